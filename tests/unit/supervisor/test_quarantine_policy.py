"""Which failures a supervisor holds against the snapshot that its job started from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_ft.checkpoint.decide import FAILURE_LIMIT, Decision, Quarantine
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy
from tests.support.pumps import answer, pump

SNAPSHOT = SnapshotId(1, 1)
START = Decision(SNAPSHOT, 10, True, (), {})


def test_only_who_has_loaded_a_snapshot_can_fail_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies while another still loads says nothing of the weights."""

    async def story(state: JobState) -> None:
        of = pump()
        policy = QuarantinePolicy(state, of, near=5)
        await policy.begin(START, (Ancestor(1, None),), ranks=2)

        def loads(shard: str) -> None:
            of.fleet.take(m.NodeEvent("n0", 0, m.Restored(shard, SNAPSHOT)))

        loads("dp0")
        for _ in range(FAILURE_LIMIT):
            assert not await policy.training_failed()
        assert state.record.quarantine == Quarantine()

        async def refresh() -> None:
            """A node answers behind what it has told."""
            loads("dp1")

        monkeypatch.setattr(of.fleet, "refresh", refresh)
        rejected = [await policy.training_failed() for _ in range(FAILURE_LIMIT)]
        assert rejected == [False] * (FAILURE_LIMIT - 1) + [True]
        assert state.record.quarantine.rejected == (SNAPSHOT,)
        await of.fleet.close()

    with JobState(tmp_path / "job", "job") as state:
        asyncio.run(asyncio.wait_for(story(state), 100))


def test_a_rewind_that_cannot_be_noted_is_told_and_still_carried_out(tmp_path: Path) -> None:
    told: list[str] = []
    with JobState(tmp_path / "job", "job") as state:
        observers = Observers()
        observers.subscribe(lambda event: told.append(event.kind))
        of = pump(observers=observers)
        (tmp_path / "job" / ".job.json.tmp").mkdir()
        policy = QuarantinePolicy(state, of, near=5)
        of.fleet.take_answer(answer("n0", rewind=7))
        policy.rewind()
        assert policy.quarantine.before == 7
    assert told == ["notes_unwritten", "rewind"]
