"""The server that forks ranks: who failed, who hung, and nothing stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ForkServer, Outcome, Request


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("tests.programs.fork_cases", {})
    yield server
    server.close()


def run(server: ForkServer, folder: Path, function: str, timeout: float = 20.0) -> Outcome:
    argument = str(os.getpid()) if function == "interrupt_the_test" else "x"
    return server.run(
        Request(f"tests.programs.fork_cases:{function}", [argument], 3, str(folder), timeout)
    )


def test_ranks_get_their_arguments_and_places(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "succeed")
    assert (outcome.codes, outcome.hung) == ([0, 0, 0], [])
    assert outcome.output(2) == "argument x rank 2 of 3\n"


def test_the_rank_that_failed_is_named_with_what_it_said(
    server: ForkServer, tmp_path: Path
) -> None:
    outcome = run(server, tmp_path, "fail_on_rank_1")
    assert (outcome.codes, outcome.hung) == ([0, 1, 0], [])
    assert "--- rank 1" in outcome.story() and "no such thing" in outcome.story()


def test_the_rank_that_hangs_is_named_with_its_stack(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "wait_for_ever_on_rank_1", timeout=1.0)
    assert (outcome.codes, outcome.hung) == ([0, -9, 0], [1])
    assert "wait_for_ever_on_rank_1" in outcome.output(1)


def test_a_run_that_was_given_up_answers_for_no_other(server: ForkServer, tmp_path: Path) -> None:
    def give_up(*_: Any) -> None:
        raise TimeoutError("as of a test's time limit")

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeoutError):
            run(server, tmp_path / "given up", "interrupt_the_test")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert run(server, tmp_path / "next", "fail_on_rank_1").codes == [0, 1, 0]


def test_a_server_that_ends_costs_one_run(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with status -9"):
        run(server, tmp_path / "first", "end_the_server")
    assert run(server, tmp_path / "next", "succeed").codes == [0, 0, 0]
