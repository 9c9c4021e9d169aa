"""Which failures a supervisor holds against the snapshot that its job started from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_ft.checkpoint.decide import FAILURE_LIMIT, Decision, Quarantine
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.quarantine_policy import QuarantinePolicy

SNAPSHOT = SnapshotId(1, 1)
START = Decision(SNAPSHOT, 10, True, (), {})


def test_only_who_has_loaded_a_snapshot_can_fail_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies while another still loads says nothing of the weights."""

    async def story(state: JobState) -> None:
        coordinator = Coordinator(
            JobKeys.derive(bytes(32)), Observers(), lambda world: None, Timing()
        )
        policy = QuarantinePolicy(state, coordinator, near=5)
        await policy.begin(START, (Ancestor(1, None),), ranks=2)

        def loads(shard: str) -> None:
            coordinator._on_event(m.NodeEvent("n0", 0, m.Restored(shard, SNAPSHOT)))

        loads("dp0")
        for _ in range(FAILURE_LIMIT):
            assert not await policy.training_failed()
        assert state.record.quarantine == Quarantine()

        async def refresh() -> None:
            """A node answers behind what it has told."""
            loads("dp1")

        monkeypatch.setattr(coordinator, "refresh", refresh)
        rejected = [await policy.training_failed() for _ in range(FAILURE_LIMIT)]
        assert rejected == [False] * (FAILURE_LIMIT - 1) + [True]
        assert state.record.quarantine.rejected == (SNAPSHOT,)
        await coordinator.close()

    with JobState(tmp_path / "job", "job") as state:
        asyncio.run(asyncio.wait_for(story(state), 100))


def test_a_rewind_that_cannot_be_noted_is_told_and_still_carried_out(tmp_path: Path) -> None:
    told: list[str] = []
    with JobState(tmp_path / "job", "job") as state:
        observers = Observers()
        observers.subscribe(lambda event: told.append(event.kind))
        coordinator = Coordinator(
            JobKeys.derive(bytes(32)), observers, lambda world: None, Timing()
        )
        coordinator.rewind_before = 7
        (tmp_path / "job" / ".job.json.tmp").mkdir()
        policy = QuarantinePolicy(state, coordinator, near=5)
        policy.rewind()
        assert policy.quarantine.before == 7
    assert told == ["notes_unwritten", "rewind"]
