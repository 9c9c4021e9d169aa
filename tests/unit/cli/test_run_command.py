"""A command line of `megatron-ft run` as a value, and a job that is followed by its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import processes
from megatron_ft.cli.run import EXIT_NO_SPARE, _run
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.errors import ControlPlaneError, ProtectionError
from megatron_ft.launchers import trainer_host
from megatron_ft.launchers.world import WORLD
from megatron_ft.supervisor.events import JobEvent, Observers, StoppedEvent
from megatron_ft.supervisor.supervisor import EXIT_CONTINUE

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['WORD']]))"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunCommand]:
    name = f"followed-{os.getpid()}"
    flags = {"--job": name, "--nodes": 2, "--spares": 1, "--protect": "xor:2"}
    places = {"--state-dir": tmp_path / "state", "--log-dir": tmp_path / "logs"}
    made = RunCommand(
        {**flags, **places}, ("python", "train.py", "--flag", "a b"), {"WORD": "a 'b"}
    )
    yield made
    made.cluster().destroy()


def test_the_printed_command_is_the_one_that_is_started(job: RunCommand) -> None:
    shown = replace(job, program=(sys.executable, "-c", SHOW))
    assert max(map(len, shown.shell().splitlines())) < 160 and "\n" in shown.shell()
    printed = subprocess.run(["bash", "-c", shown.shell()], capture_output=True, check=True)
    started = subprocess.run(shown.words, env=shown.environment(), capture_output=True, check=True)
    assert json.loads(printed.stdout) == json.loads(started.stdout)
    assert json.loads(printed.stdout)[0][-5:] == ["--", *job.training]


def test_the_spec_is_that_of_run(job: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FT_PROTECT", "none")
    assert "MEGATRON_FT_PROTECT" not in job.environment() and job.environment()["WORD"] == "a 'b"
    assert (job.spec.nodes, str(job.spec.scheme), job.spec.command) == (2, "xor:2", job.training)
    assert job.node_names == ["node0", "node1", "node2"] and job.notes.name == job.spec.name
    with pytest.raises(ProtectionError, match="needs 4 nodes"):
        _ = replace(job, flags={**job.flags, "--protect": "rs:3+1"}).spec


def ended(job: RunCommand, script: str) -> tuple[str, int | None, int]:
    """How a job is over whose command is this script, its exit code, and how often it ran."""
    count = job.notes.parent.with_name("count")
    count.unlink(missing_ok=True)
    program = ("sh", "-c", f"echo >> {count}; {script}", "sh")
    follower, deadline = Follower(replace(job, program=program), 2), time.monotonic() + 60
    follower.start()
    while not (over := follower.over()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return over, follower.code, len(count.read_text())


def test_a_command_that_dies_is_run_again_and_one_that_says_how_it_ended_is_not(
    job: RunCommand,
) -> None:
    assert ended(job, "exit 0") == ("finished", 0, 1)
    assert ended(job, f"exit {EXIT_CONTINUE}") == ("finished", EXIT_CONTINUE, 1)
    assert ended(job, f"exit {EXIT_NO_SPARE}") == ("stopped", EXIT_NO_SPARE, 1)
    assert ended(job, "kill -9 $$") == ("stopped", -9, 3)
    assert ended(job, "exit 1") == ("stopped", 1, 3)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("a mistake"), 1, "ValueError: a mistake"),
        (ControlPlaneError("no port"), 2, "no port"),
    ],
)
def test_a_command_that_fails_says_so_in_the_event_log(
    error: Exception, code: int, text: str
) -> None:
    supervisor, told = (
        Mock(observers=Observers(), run=AsyncMock(side_effect=error)),
        list[JobEvent](),
    )
    supervisor.observers.subscribe(told.append)
    with pytest.raises(type(error)):
        asyncio.run(_run(supervisor))
    assert [(one.kind, one.text, one.fields["code"]) for one in told] == [
        (StoppedEvent.kind, text, code)
    ]


def test_roles_are_seen_from_outside() -> None:
    name = f"roles-{os.getpid()}"
    place, sleep = {JOB: name, NODE: "node0"}, "import time; time.sleep(60)"
    wanted = {
        "trainer": ({**place, "RANK": "3"}, ["train.py"]),
        "smp": (place, ["-m", "megatron_ft.smp"]),
        "drain": (place, ["-m", "megatron_ft.checkpoint.drain"]),
        "host": (place, [trainer_host.__file__]),
        "encoder": ({**place, WORLD: "w"}, ["-m", "megatron_ft.erasure.worker"]),
        "launcher": ({JOB: name, WORLD: "w"}, ["mpirun"]),
    }
    started = {
        role: subprocess.Popen([sys.executable, "-c", sleep, *words], env=variables)
        for role, (variables, words) in wanted.items()
    }
    try:
        for role, process in started.items():
            assert processes(name, role) == [process.pid], role
        world = {started["encoder"].pid, started["launcher"].pid}
        assert set(processes(name, "world")) == world
        assert processes(name, "trainer", "node0", 3) and not processes(name, "trainer", "node0", 2)
        assert not processes(name, "smp", "node1")
    finally:
        for process in started.values():
            process.kill()
            process.wait()
