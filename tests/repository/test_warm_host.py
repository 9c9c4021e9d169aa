"""Runs of ranks that the tests' host forks: which failed, which hung, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core import procfs
from tests.support.warm_host import Outcome, Request, WarmHost


@pytest.fixture(scope="module")
def server() -> Iterator[WarmHost]:
    server = WarmHost("tests.programs.fork_cases", {})
    yield server
    server.close()


def run(server: WarmHost, folder: Path, function: str, timeout: float = 20.0) -> Outcome:
    argument = str(os.getpid()) if function == "interrupt_the_test" else "x"
    return server.run(
        Request(f"tests.programs.fork_cases:{function}", [argument], 3, str(folder), timeout)
    )


def test_ranks_get_their_arguments_and_places(server: WarmHost, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "succeed")
    assert (outcome.codes, outcome.hung) == ([0, 0, 0], [])
    assert outcome.output(2) == "argument x rank 2 of 3\n"


def test_the_rank_that_failed_is_named_with_what_it_said(server: WarmHost, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "fail_on_rank_1")
    assert (outcome.codes, outcome.hung) == ([0, 1, 0], [])
    assert "--- rank 1" in outcome.story() and "no such thing" in outcome.story()


def test_the_rank_that_hangs_is_named_with_its_stack(server: WarmHost, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "wait_for_ever_on_rank_1", timeout=5.0)
    assert (outcome.codes, outcome.hung) == ([0, -9, 0], [1])
    assert "wait_for_ever_on_rank_1" in outcome.output(1)


def test_ranks_of_a_run_that_was_given_up_end(server: WarmHost, tmp_path: Path) -> None:
    def give_up(*_: Any) -> None:
        raise TimeoutError("as of a test's time limit")

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeoutError):
            run(server, tmp_path / "given up", "interrupt_the_test")
    finally:
        signal.signal(signal.SIGUSR1, before)
    pid = int((tmp_path / "given up" / "rank1.log").read_text())
    deadline = time.monotonic() + 20
    while (stat := procfs.read_stat(pid)) is not None and not stat.ended:
        assert time.monotonic() < deadline, f"rank 1 still runs as {pid}"
        time.sleep(0.01)
