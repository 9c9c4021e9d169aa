"""What a training changes in its process is put back before it is entered again, or named."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ProcessChangedError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import listen_local
from megatron_ft.trainer import resilient, teardown
from megatron_ft.trainer.process_settings import ProcessSetting
from megatron_ft.trainer.resilient import RestartClient
from megatron_ft.trainer.teardown import ProcessState
from tests.programs.changed_process import CASES, FOR_GOOD

SECONDS = 120.0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each change, all made in one process."""
    program = [sys.executable, "-m", "tests.programs.changed_process"]
    done = subprocess.run(program, stdout=subprocess.PIPE, timeout=SECONDS, check=True, text=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_before(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "restored"


@pytest.mark.parametrize("name", FOR_GOOD)
def test_what_cannot_be_put_back_is_named(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "training has changed the session, which cannot be undone"


def test_a_setting_that_cannot_be_read_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's getters raise where a script has mixed two of its APIs."""

    def unreadable() -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(teardown, "settings", lambda: [ProcessSetting("torch.mixed", unreadable)])
    ProcessState().restore()


def test_only_what_stays_different_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"good": 1, "stuck": 1, "refused": 1}

    def put(name: str, value: int) -> None:
        if name == "refused":
            raise PermissionError
        if name == "good":
            values[name] = value

    table = [ProcessSetting(name, partial(values.get, name), partial(put, name)) for name in values]
    monkeypatch.setattr(teardown, "settings", lambda: table)
    state = ProcessState()
    values.update(dict.fromkeys(values, 2))
    with pytest.raises(ProcessChangedError, match="changed stuck, refused, which cannot be undone"):
        state.restore()


def test_loggers_of_packages_that_were_imported_since_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import is not repeated, and with it what it has made of its logger."""
    monkeypatch.setattr(logging.Logger, "manager", logging.Manager(logging.root))
    monkeypatch.setattr(logging.root, "manager", logging.Logger.manager)
    state = ProcessState()
    package, own = logging.getLogger("json.of_test"), logging.getLogger("own_of_test")
    for logger in (package, own):
        logger.addHandler(logging.NullHandler())
    state.restore()
    assert (len(package.handlers), len(own.handlers)) == (1, 0)


def test_the_job_hears_why_a_process_cannot_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, heard = ProcessEnvironment("job", "node", tmp_path, 1), []

    def serve(smp: Any) -> None:
        peer, _ = smp.recv_multipart()
        for message in (m.Ok(), m.LetGo(2)):
            smp.send_multipart([peer, m.encode(message)])
        heard.append(m.decode(smp.recv_multipart()[1]))

    def fail(state: object) -> None:
        raise ProcessChangedError("training has changed nice, which cannot be undone")

    monkeypatch.setattr(resilient, "tear_down", fail)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as smp:
        smp.linger, smp.rcvtimeo = 0, 15_000
        listen_local(smp, environment.socket)
        thread = threading.Thread(target=serve, args=(smp,))
        thread.start()
        with closing(RestartClient(environment, 3, ProcessState())) as client:
            assert client.announce() and client._requested.wait(10.0)
            with pytest.raises(ProcessChangedError):
                client.restart()
        thread.join(20.0)
    (released,) = heard
    assert isinstance(released, m.Released)
    assert (
        released.unfit == "ProcessChangedError: training has changed nice, which cannot be undone"
    )
