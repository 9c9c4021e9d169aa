"""The loop of a trainer that restarts in process, and the interrupt that brings it back."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from megatron_ft import run_resilient
from megatron_ft.core.environment import JOB, ProcessEnvironment
from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import listen_local
from megatron_ft.trainer import teardown
from megatron_ft.trainer.resilient import RestartClient, comes_from_others
from megatron_ft.trainer.teardown import ProcessState
from tests.support.warm_host import Request


def chained(error: BaseException, cause: BaseException | None, *, known: bool) -> BaseException:
    """``error``, raised from ``cause`` or while that was handled."""
    if known:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
PEER = RuntimeError(GLOO)


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (PEER, True),
        (torch.distributed.DistBackendError("NCCL error in: ..."), True),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), True),
        (ConnectionResetError(), True),
        (chained(ValueError("no loss"), PEER, known=True), True),
        (chained(KeyError("loss"), chained(OSError(), PEER, known=True), known=False), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError(GLOO), False),
        (AssertionError(), False),
    ],
    ids=repr,
)
def test_an_error_of_a_collective_may_be_the_fault_of_others(
    error: BaseException, blames: bool
) -> None:
    assert comes_from_others(error) is blames


def test_errors_that_lead_to_each_other_end_the_search() -> None:
    one, other = ValueError(), KeyError()
    one.__context__, other.__context__ = other, one
    assert not comes_from_others(one)


def test_without_a_job_the_function_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB, raising=False)
    calls: list[str] = []

    def fail() -> None:
        calls.append("fail")
        raise RuntimeError(GLOO)

    assert run_resilient(lambda: 7) == 7
    with pytest.raises(RuntimeError, match="Connection closed"):
        run_resilient(fail)
    assert calls == ["fail"]


def test_another_thread_than_the_main_one_calls_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals interrupt the main thread only."""
    monkeypatch.setattr("megatron_ft.trainer.resilient._announce", lambda: pytest.fail("announced"))
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run_resilient(lambda: 7)))
    thread.start()
    thread.join(10.0)
    assert results == [7]


def test_a_framework_that_cannot_be_left_declines_before_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No SMP is there: an announcement would wait for its answer, and say another word."""
    for name, value in ProcessEnvironment("job", "node", tmp_path, 1).variables().items():
        monkeypatch.setenv(name, value)

    def prepare() -> None:
        raise UnsupportedVersionError("framework 0.1 is too old")

    monkeypatch.setattr(teardown, "_preparations", [prepare])
    with caplog.at_level(logging.WARNING):
        assert run_resilient(lambda: [record.message for record in caplog.records]) == [
            "training cannot restart in process, but in a new one: framework 0.1 is too old"
        ]


def test_a_client_announces_itself_right_after_another(tmp_path: Path) -> None:
    """The SMP is busy, and has not seen yet that the first one has left."""
    environment, announced = ProcessEnvironment("job", "node", tmp_path, 1), []

    def answer(smp: Any) -> None:
        for _ in range(2):
            peer, _ = smp.recv_multipart()
            smp.send_multipart([peer, m.encode(m.Ok())])
            time.sleep(0.2)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as smp:
        smp.linger, smp.rcvtimeo = 0, 15_000
        listen_local(smp, environment.socket)
        thread = threading.Thread(target=answer, args=(smp,))
        thread.start()
        for _ in range(2):
            with closing(RestartClient(environment, 0, ProcessState())) as client:
                announced.append(client.announce())
        thread.join(20.0)
    assert announced == [True, True]


WAYS = (
    *("in_python", "in_system_call", "in_lock", "in_swallowing_code", "in_loader", "connecting"),
    *("all_reduce", "barrier", "broadcast", "store_get", "store_wait", "rendezvous"),
)
ROUNDS = 2
MOST_SECONDS = 1.5
"""Below the 2 s after which an SMP kills a survivor; code that swallows it is asked twice more."""


@pytest.mark.mpi
def test_a_training_function_ends_within_the_time_that_its_smp_waits(
    warm_host: Any, tmp_path: Path
) -> None:
    outcome = warm_host.run(
        Request(
            entry="tests.programs.interrupted_program:main",
            argv=[str(ROUNDS), *WAYS],
            ranks=2,
            logs=str(tmp_path),
            timeout_seconds=100.0,
        )
    )
    assert not any(outcome.codes), outcome.story()
    for rank in range(2):
        lines = [line.split() for line in outcome.output(rank).splitlines()]
        found = [words for words in lines if len(words) == 5 and words[0] in WAYS]
        assert len(found) == ROUNDS * len(WAYS), outcome.story()
        late = {words[0]: words[1] for words in found if float(words[1]) > MOST_SECONDS}
        assert not late, outcome.story()
