"""The server that forks ranks: who failed, who hung, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer, Outcome, Request


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("fork_cases", {})
    yield server
    server.close()


def run(server: ForkServer, folder: Path, function: str, timeout: float = 20.0) -> Outcome:
    return server.run(Request(f"fork_cases:{function}", ["x"], 3, str(folder), timeout))


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
