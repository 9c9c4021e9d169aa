"""``megatron-ft verify`` beside a job that gives up snapshots for newer ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader
from megatron_ft.checkpoint.live import LiveSource, node_folders
from megatron_ft.checkpoint.source import OpenSnapshot, SnapshotInfo
from megatron_ft.cli import verify
from tests.support.disk_samples import SHARDS, Memory


class Busy(LiveSource):
    """A job that trains: each time that a snapshot is to be opened, ``steps`` newer ones are
    committed first, each in the slot of the oldest."""

    def __init__(self, memory: Memory, steps: list[int]) -> None:
        super().__init__(node_folders(memory.root / memory.job))
        self._memory, self._steps, self._newest = memory, steps, 2

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        for _ in range(self._steps.pop(0) if self._steps else 0):
            self._newest += 1
            self._memory.commit(self._newest, 10 * self._newest)
        with super().open(info) as opened:
            yield opened


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """Two snapshots, of iterations 10 and 20, in two slots."""
    memory = Memory(tmp_path)
    for sequence in (1, 2):
        memory.commit(sequence, 10 * sequence)
    return memory


@pytest.mark.parametrize(
    ("steps", "iterations"),
    [([], [20, 10]), ([0, 1], [20]), ([1], [20]), ([2], [40, 30]), ([2, 0, 2, 2], [80, 70])],
)
def test_what_was_given_up_meanwhile_is_no_damage(
    memory: Memory, steps: list[int], iterations: list[int]
) -> None:
    found = verify.check(Busy(memory, steps))
    assert [entry["iteration"] for entry in found["snapshots"]] == iterations
    assert not any(entry["problem"] for entry in found["snapshots"]) and not found["problems"]


def test_a_job_that_is_always_faster_ends_the_search(memory: Memory) -> None:
    found = verify.check(Busy(memory, [2] * 100))
    assert not any(not entry["problem"] for entry in found["snapshots"])


def test_damage_that_stays_is_reported(memory: Memory) -> None:
    memory.flip(SHARDS[0], 1)
    found = verify.check(Busy(memory, []))
    assert [bool(entry["problem"]) for entry in found["snapshots"]] == [False, True]
    memory.commit(3, 30)  # in the slot of the damaged one
    assert not any(e["problem"] for e in verify.check(Busy(memory, []))["snapshots"])


def test_a_problem_that_only_one_look_shows_is_none(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is committed on one node, and on the other one a moment later."""
    with Arena.open(memory.path(SHARDS[1])) as arena:
        header = arena.slot(0)
        arena.write_slot(0, SlotHeader())
    source = Busy(memory, [])
    assert source.snapshots() and source.problems
    looks: list[float] = []

    def commit(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            with Arena.open(memory.path(SHARDS[1])) as late:
                late.write_slot(0, header)

    monkeypatch.setattr(verify.time, "sleep", commit)
    assert verify.check(source)["problems"] == [] and len(looks) == 2


def test_a_problem_that_stays_is_reported(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LOOK_SECONDS", 0.0)
    with Arena.open(memory.path(SHARDS[1])) as arena:
        arena.write_slot(0, SlotHeader())
    (problem,) = verify.check(Busy(memory, []))["problems"]
    assert problem == "snapshot 1.2 is not held by dp1"
