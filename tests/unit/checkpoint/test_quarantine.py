"""Which snapshots are not used again: a pure decision, checked as properties."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint.decide import FAILURE_LIMIT, MOST_REJECTED, Decision, Quarantine
from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder, naming
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.quarantine_policy import (
    QuarantinePolicy,
    memory_goes_first,
    reason_against_own,
)
from megatron_ft.supervisor.standing import Standing
from megatron_ft.trainer.start_choice import DiskStart, RankView, choose_start
from tests.support.decisions import NEW, OLD, decided, everywhere

NEAR = 10
snapshots = st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 3))
incarnations = st.lists(st.tuples(snapshots, st.integers(0, 2 * NEAR)), max_size=20)


def after(history: list[tuple[SnapshotId, int]], near: int = NEAR) -> Quarantine:
    quarantine = Quarantine()
    for snapshot, gained in history:
        quarantine = quarantine.after_failure(snapshot, gained, near)
    return quarantine


@given(incarnations)
def test_exactly_those_are_out_that_failed_twice_near_with_no_success_between(
    history: list[tuple[SnapshotId, int]],
) -> None:
    expected: dict[SnapshotId, int] = {}
    for snapshot, gained in history:
        if expected.get(snapshot, 0) < FAILURE_LIMIT:
            expected[snapshot] = 0 if gained > NEAR else expected.get(snapshot, 0) + 1
    quarantine = after(history)
    for snapshot, failures in expected.items():
        out = bool(quarantine.reason_against(snapshot, 5))
        assert out == (failures >= FAILURE_LIMIT)
        assert quarantine.failures(snapshot) == (0 if out else failures)
    assert len(quarantine.rejected) == len({*quarantine.rejected})
    assert quarantine.over_disk == bool(quarantine.rejected)


@given(incarnations)
def test_switched_off_it_suspects_nothing(history: list[tuple[SnapshotId, int]]) -> None:
    assert after(history, near=0) == Quarantine()


@given(incarnations, st.lists(st.integers(0, 50), max_size=3))
def test_it_survives_the_notes_on_disk(
    history: list[tuple[SnapshotId, int]], rewinds: list[int]
) -> None:
    quarantine = after(history)
    for before in rewinds:
        quarantine = quarantine.rewound(before)
    stored = msgspec.json.encode(quarantine)
    assert msgspec.json.decode(stored, type=Quarantine) == quarantine


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 60))
def test_a_rewind_leaves_out_the_earliest_that_was_asked_for_until_it_is_carried_out(
    rewinds: list[int], iteration: int
) -> None:
    quarantine = Quarantine()
    for before in rewinds:
        quarantine = quarantine.rewound(before)
    out = bool(quarantine.reason_against(SnapshotId(1, 1), iteration))
    assert out == (iteration >= min(rewinds))
    assert bool(quarantine.reason_against_iteration(iteration)) == out
    settled = quarantine.settled()
    assert not settled.reason_against(SnapshotId(1, 1), iteration) and settled.over_disk


def test_its_size_is_bounded() -> None:
    history = [(SnapshotId(1, n), 0) for n in range(500) for _ in range(FAILURE_LIMIT)]
    quarantine = after(history + [(SnapshotId(2, n), 0) for n in range(500)])
    assert len(quarantine.rejected) == len(quarantine.suspects) == MOST_REJECTED


def test_recovery_passes_over_what_is_rejected_and_says_why() -> None:
    arenas = everywhere()
    bad = after([(NEW, 0), (NEW, 3)])
    assert decided(arenas, quarantine=bad).snapshot == OLD
    both = bad.after_failure(OLD, 1, NEAR).after_failure(OLD, 1, NEAR)
    nothing = decided(arenas, quarantine=both)
    assert nothing.snapshot is None and "failed 2 times soon after" in nothing.explanation


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("iter_0000050", True),
        ("iter_0000049", False),
        ("global_step50", True),
        ("global_step49", False),
        ("best", False),
    ],
)
def test_a_frameworks_own_checkpoint_of_what_was_rewound_is_not_loaded(
    name: str, out: bool
) -> None:
    """Megatron's and DeepSpeed's; of one whose name says no iteration nothing is known."""
    rewound = Quarantine().rewound(50)
    assert bool(reason_against_own(rewound, Path("/checkpoints") / name)) is out
    assert reason_against_own(rewound, None) == ""


def saved(directory: Path, iteration: int) -> Path:
    folder = checkpoint_folder(directory, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").touch()
    tracker = directory / TRACKER
    before = tracker.stat().st_mtime_ns if tracker.exists() else 0
    tracker.write_text(str(iteration))
    # Two writes within one tick of the kernel's clock would have one time.
    written = max(tracker.stat().st_mtime_ns, before + 1)
    os.utime(tracker, ns=(written, written))
    return folder


def test_a_frameworks_own_checkpoint_that_was_given_up_is_not_loaded_until_it_is_saved_again(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path, 60)
    given_up = Quarantine().giving_up(naming(tmp_path)).giving_up("")
    assert "rolled back from" in reason_against_own(given_up, folder)
    assert not reason_against_own(Quarantine(), folder)
    assert not reason_against_own(given_up, saved(tmp_path, 58))
    assert not reason_against_own(given_up, saved(tmp_path, 60))


class Told:
    """The pump and the fleet as the policy sees them; every rank is at iteration 52."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.listen, self.listen_answers = self.listeners.append, list[Any]().append
        self.fleet = self
        self.progress, self.observers = {"n0": 52}, Observers()
        self.standing = Standing(DamagedShards(self.observers))

    def forget_progress(self) -> None:
        self.progress.clear()

    async def refresh(self) -> None:
        self.progress["n0"] = 52


@pytest.mark.parametrize(
    ("saved_at", "rejected", "rewound"),
    [(49, False, False), (50, False, True), (51, True, True), (None, False, False)],
)
def test_what_was_saved_after_a_bad_snapshot_or_what_was_rewound_is_given_up(
    tmp_path: Path, saved_at: int | None, rejected: bool, rewound: bool
) -> None:
    """A snapshot of iteration 50 fails twice; or the job is rewound to before 50."""
    if saved_at is not None:
        saved(tmp_path, saved_at)
    start, told = Decision(NEW, 50, False, (), {}), Told()
    with JobState(tmp_path / "failed", "job") as state:
        policy = QuarantinePolicy(state, told, NEAR, tmp_path)  # type: ignore[arg-type]

        async def fail_twice() -> list[bool]:
            await policy.begin(start, (), 0)
            return [await policy.training_failed() for _ in range(FAILURE_LIMIT)]

        assert asyncio.run(fail_twice()) == [False, True]
        assert bool(policy.quarantine.own) is rejected
    with JobState(tmp_path / "rewound", "job") as state:
        state.update(quarantine=Quarantine().rewound(50))
        policy = QuarantinePolicy(state, told, NEAR, tmp_path)  # type: ignore[arg-type]
        asyncio.run(policy.begin(start, (), 0))
        assert bool(policy.quarantine.own) is rewound
        assert policy.quarantine.before is None


def rejected(quarantine: Quarantine) -> Quarantine:
    for _ in range(FAILURE_LIMIT):
        quarantine = quarantine.after_failure(NEW, 0, NEAR)
    return quarantine


@pytest.mark.parametrize("roll_back", [lambda q: q.rewound(50), rejected], ids=["rewind", "bad"])
def test_memory_goes_first_until_the_framework_saves_anew(
    tmp_path: Path, roll_back: Callable[[Quarantine], Quarantine]
) -> None:
    """What it saves after a rollback is of what has been done since, and counts as ever."""
    words: list[str] = []
    with JobState(tmp_path / "state", "job") as state:
        policy = QuarantinePolicy(state, Told(), NEAR, tmp_path)  # type: ignore[arg-type]

        def begin(iteration: int) -> bool:
            """An incarnation; whether the framework's own goes behind memory for the next one."""
            decision = Decision(NEW, iteration, False, (), {})
            asyncio.run(policy.begin(decision, (), 1))
            words.append(policy.source(decision))
            return memory_goes_first(policy.quarantine, tmp_path)

        saved(tmp_path, 60)
        assert not begin(56)
        state.update(quarantine=roll_back(policy.quarantine))
        assert begin(44) and begin(46)
        folder = saved(tmp_path, 60)
        assert not begin(58) and not reason_against_own(policy.quarantine, folder)
        state.update(quarantine=roll_back(policy.quarantine))
        assert begin(44) and reason_against_own(policy.quarantine, folder)
    assert words == ["memory", "rewound", "rewound", "memory", "rewound"]


@pytest.mark.parametrize(("start", "out"), [(44, True), (48, False)])
def test_what_an_incarnation_passes_over_will_be_saved_over_and_is_given_up(
    tmp_path: Path, start: int, out: bool
) -> None:
    """Nothing is wrong with 48 until then, and nobody can tell when training has come there."""
    folder = saved(tmp_path, 48)
    with JobState(tmp_path / "state", "job") as state:
        state.update(quarantine=Quarantine().rewound(50))
        policy = QuarantinePolicy(state, Told(), NEAR, tmp_path)  # type: ignore[arg-type]
        asyncio.run(policy.begin(Decision(NEW, start, False, (), {}), (), 1))
        assert bool(reason_against_own(policy.quarantine, folder)) is out


@pytest.mark.parametrize("known", [False, True])
def test_what_was_there_at_a_rollback_but_could_not_be_read_does_not_count_as_new(
    tmp_path: Path, known: bool
) -> None:
    """An incarnation began without anybody knowing; as where no folder was named."""
    directory = saved(tmp_path / "own", 60).parent
    with JobState(tmp_path / "state", "job") as state:
        state.update(quarantine=Quarantine().rewound(50))
        for folder in (None, directory if known else None):
            policy = QuarantinePolicy(state, Told(), NEAR, folder)  # type: ignore[arg-type]
            asyncio.run(policy.begin(Decision(NEW, 46, False, (), {}), (), 1))
            assert policy.source(Decision(NEW, 46, False, (), {})) == "rewound"
            assert memory_goes_first(policy.quarantine, directory)
        assert bool(reason_against_own(policy.quarantine, directory / "iter_0000060")) is known


def test_a_tracker_file_that_cannot_be_read_ends_no_recovery(tmp_path: Path) -> None:
    saved(tmp_path, 60)
    (tmp_path / TRACKER).write_bytes(b"\xff60")
    with JobState(tmp_path / "state", "job") as state:
        state.update(quarantine=Quarantine().rewound(50))
        policy = QuarantinePolicy(state, Told(), NEAR, tmp_path)  # type: ignore[arg-type]
        asyncio.run(policy.begin(Decision(NEW, 46, False, (), {}), (), 1))
        assert not policy.quarantine.own and policy.quarantine.before is None


def say_restored(told: Told, rank: int) -> None:
    body = m.Restored(f"pp0-tp0-dp{rank}-ep0", NEW)
    for listener in told.listeners:
        listener(m.NodeEvent("n0", 3, body))


def test_a_failure_counts_only_if_all_ranks_of_that_incarnation_had_loaded_the_snapshot(
    tmp_path: Path,
) -> None:
    start, told = Decision(NEW, 50, False, (), {}), Told()
    with JobState(tmp_path, "job") as state:
        policy = QuarantinePolicy(state, told, NEAR)  # type: ignore[arg-type]

        async def fail(*restored: int) -> int:
            policy.admitted()
            await policy.begin(start, (), 2)
            for rank in restored:
                say_restored(told, rank)
            await policy.training_failed()
            return policy.quarantine.failures(NEW)

        async def fail_often() -> list[int]:
            return [await fail(0), await fail(1), await fail(0, 1)]

        assert asyncio.run(fail_often()) == [0, 0, 1]


def test_a_drain_of_what_was_given_up_is_not_on_disk_for_the_next_incarnation(
    tmp_path: Path,
) -> None:
    start, told = Decision(OLD, 46, False, (), {}), Told()
    lineage = (Ancestor(1, None), Ancestor(3, OLD))
    with JobState(tmp_path, "job") as state:
        policy = QuarantinePolicy(state, told, NEAR)  # type: ignore[arg-type]
        for snapshot, kept in ((OLD, True), (NEW, False)):
            told.standing.drains(snapshot, 50)
            asyncio.run(policy.begin(start, lineage, 1))
            assert (told.standing.durable is not None) is kept


def test_recovery_rewinds_to_the_newest_before_the_iteration() -> None:
    """All slots of these samples are of iteration 50."""
    arenas = everywhere()
    assert decided(arenas, quarantine=Quarantine().rewound(51)).snapshot == NEW
    refused = decided(arenas, quarantine=Quarantine().rewound(50))
    assert refused.snapshot is None and "before iteration 50" in refused.explanation


def test_a_rewound_job_does_not_load_the_newer_checkpoint_of_what_it_gave_up() -> None:
    ranks = [RankView(8, DiskStart(10))] * 2
    assert not choose_start(ranks).from_memory
    rewound = choose_start([view._replace(rewound=True) for view in ranks])
    assert rewound.from_memory and "rewound to before what is on disk" in rewound.reason
    asked = [RankView(8, DiskStart(10, "the checkpoint 'x'"), wish_changed=True, rewound=True)] * 2
    assert not choose_start(asked).from_memory, "what the user names now is what he wants"
