"""Nodes that are not used after a vote or after failures: pure decisions."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from megatron_ft.cli.main import main
from megatron_ft.supervisor.ends import (
    Failure,
    NodeLost,
    RebuildFailed,
    ReplicasDiffer,
    TrainerFailed,
    TrainerStopped,
)
from megatron_ft.supervisor.health import NEEDED, NO_SPARE, node_at_fault, vote_of, why_used

ON_A, ON_B = TrainerFailed("rank 0 exited", "a"), TrainerStopped("rank 1 killed", "b", status=-9)
PROVEN = ReplicasDiffer("replicas differ", "b")


@pytest.mark.parametrize(
    ("failures", "node"),
    [
        ([], ""),
        ([ON_A], ""),
        ([ON_A, ON_A], "a"),
        ([ON_A, ON_B], ""),
        ([ON_A, ON_A, ON_B], ""),
        ([ON_B, ON_A, ON_A], "a"),
        ([ON_A, NodeLost("lost", "a")], ""),
        ([RebuildFailed("one"), RebuildFailed("two")], ""),
        ([ON_A, PROVEN], "b"),
        ([PROVEN, ON_A], ""),
    ],
)
def test_a_node_is_named_by_two_failures_in_a_row_or_by_proof(
    failures: list[Failure], node: str
) -> None:
    assert node_at_fault(failures) == node


@pytest.mark.parametrize(
    ("status", "verdict", "unrunnable"),
    [
        (0, "healthy", False),
        (1, "unhealthy", False),
        (127, "unhealthy", True),
        (-9, "unknown", False),
        (None, "unknown", False),
    ],
)
def test_a_vote_follows_from_the_status(status: int | None, verdict: str, unrunnable: bool) -> None:
    vote = vote_of(status, "ECC errors", 30.0)
    assert (vote.verdict, vote.unrunnable) == (verdict, unrunnable)
    assert ("ECC errors" in vote.reason) == bool(status)


def test_suspects_are_used_where_nobody_can_take_their_places() -> None:
    def serves(nodes: Collection[str]) -> bool:
        return len(nodes) <= 1

    active = ["a", "b", "c"]
    assert why_used(["a"], active, 0, serves) == {"a": NO_SPARE}
    assert why_used(["a", "b"], active, 1, serves) == {"a": "", "b": NO_SPARE}
    assert why_used(["a", "b"], active, 2, serves) == {"a": "", "b": NEEDED}
    # A spare that is ill is left out without another one.
    assert why_used(["d", "a"], active, 0, serves) == {"d": "", "a": NO_SPARE}


@pytest.mark.parametrize(
    "flags", [["--health-command", " "], ["--health-seconds", "0"], ["--health-seconds", "nan"]]
)
def test_flags_without_sense_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *flags, "--", "python", "train.py"])
    assert flags[0] in capsys.readouterr().err
