"""The end of an iteration, by what permits say; and what a trainer says of its own end."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.trainer.capture import BoundaryAction, boundary_action
from megatron_ft.trainer.capture_run import CaptureRun
from megatron_ft.trainer.engine import CaptureEngine
from megatron_ft.trainer.manager import SnapshotManager, _close_all, _say_ends
from megatron_ft.trainer.mapping import MappingState, StateAdapter
from megatron_ft.trainer.stats import Warner
from tests.support.captures import WAIT, FakeSmp, GatedCopier, gated, make_manager

WARN = Warner(logging.getLogger(__name__))


def new_state() -> dict[str, Any]:
    return {"weight": torch.arange(1000.0)}


def end(manager: SnapshotManager, iteration: int, state: dict[str, Any]) -> None:
    """As in save(), without what comes around it."""
    manager._captures.end_iteration(iteration, lambda: MappingState(state), declined=False)


def test_a_permit_is_missed_where_training_goes_back_before_it(smp: FakeSmp) -> None:
    """A script loads an older checkpoint: the permitted iteration may be hours away."""
    manager, state = make_manager(smp), new_state()
    manager.save(100, state)
    late = smp.grant(102)
    assert manager.save(51, state).skipped and smp.missed_ids == [late]
    smp.grant(53)
    assert manager.save(52, state).skipped and smp.missed_ids == [late]
    assert not manager.save(53, state).skipped
    manager.close()


def test_a_revoked_permit_is_answered_at_every_boundary_and_counted_once(smp: FakeSmp) -> None:
    """The first word may have died with an SMP, and without it the slot is never free."""
    manager, state = make_manager(smp), new_state()
    manager.prepare(state)
    snapshot = smp.grant(3)
    smp.revoke()
    for iteration in (1, 2, 3):
        end(manager, iteration, state)
    assert smp.missed_ids == [snapshot] * 3
    assert (manager.stats.missed, manager.stats.skipped) == (1, 3)
    manager.close()


def test_trainers_progress_is_written_whatever_is_permitted(smp: FakeSmp) -> None:
    manager, state = make_manager(smp), new_state()
    manager.prepare(state)
    for iteration in (1, 2, 3):
        end(manager, iteration, state)
        assert smp.arena is not None and smp.arena.progress() == iteration
    manager.close()


def test_it_waits_for_the_copy_only_until_a_fence_was_seen(smp: FakeSmp) -> None:
    copier = GatedCopier()
    manager, state = make_manager(smp, copier=copier), new_state()
    manager.prepare(state)
    copier.gate.set()
    smp.grant(1)
    end(manager, 1, state)
    run = manager._captures._run
    assert run is not None and run.moved.is_set()
    assert run.finished.wait(WAIT), "the copy thread did not finish"
    manager._captures.fence()
    copier.gate.clear()
    smp.grant(2, slot=1)
    end(manager, 2, state)
    run = manager._captures._run
    assert run is not None and not run.moved.is_set()
    copier.gate.set()
    smp.wait_ended()
    assert len(smp.sealed_records) == 2
    manager.close()


def test_nobody_says_that_nothing_is_written_while_it_is(smp: FakeSmp) -> None:
    """The SMP would take the slot for free."""
    manager, copier = gated(smp, state := new_state())
    snapshot = smp.grant(1)
    end(manager, 1, state)
    smp.revoke()
    end(manager, 2, state)
    assert manager._captures.running and not smp.missed_ids
    copier.gate.set()
    smp.wait_ended()
    run = manager._captures._run
    assert run is not None and run.finished.wait(WAIT), "the copy thread did not finish"
    assert not manager._captures.under_way, "its ticket waits for an outcome that never comes"
    end(manager, 3, state)
    assert smp.missed_ids == [snapshot] and snapshot in smp.abandoned_ids
    manager.close()


def test_an_outcome_that_comes_before_save_returns_is_not_lost(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticket would stay open, and the snapshot be under way for ever."""
    begin, sealed = CaptureEngine.start, smp.sealed

    def slow(engine: CaptureEngine, *words: Any) -> CaptureRun:
        run = begin(engine, *words)
        assert run.finished.wait(WAIT), "the copy thread did not finish"
        return run

    def prompt(snapshot: SnapshotId, record: SealedRecord) -> None:
        sealed(snapshot, record)
        assert smp.on_outcome is not None
        smp.on_outcome(snapshot, "committed")

    monkeypatch.setattr(CaptureEngine, "start", slow)
    monkeypatch.setattr(smp, "sealed", prompt)
    manager, state = make_manager(smp), new_state()
    manager.prepare(state)
    smp.grant(1)
    ticket = manager.save(1, state)
    assert ticket.committed.result(timeout=0) and not manager._captures.under_way
    manager.close()


@pytest.mark.parametrize("end", ["committed", "aborted", "revoked", "replaced"])
def test_a_rank_stays_at_its_boundary_until_the_snapshot_comes_to_nothing(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """One that is committed without parity has come to nothing; then training continues."""
    sealed = smp.sealed

    def settle(snapshot: SnapshotId, record: SealedRecord) -> None:
        sealed(snapshot, record)
        assert smp.on_outcome is not None
        if end == "revoked":
            smp.revoke()
        elif end == "replaced":
            smp.grant(9)
        else:
            smp.on_outcome(snapshot, end)

    monkeypatch.setattr(smp, "sealed", settle)
    manager, state = make_manager(smp), new_state()
    manager.prepare(state)
    smp.grant(1, stay=600.0)
    ticket = manager.save(1, state)
    assert smp.sealed_records and not ticket.skipped
    manager.close()


def test_a_rank_stays_while_the_job_may_end_it_and_no_longer_than_it_must(smp: FakeSmp) -> None:
    stay = 0.3
    manager, state = make_manager(smp), new_state()
    manager.prepare(state)
    with manager.fence():
        pass
    snapshot = smp.grant(1, stay=stay)
    started = time.monotonic()
    manager.save(1, state)
    assert time.monotonic() - started >= stay
    assert snapshot in smp.sealed_records
    manager.close()


def test_a_mapping_has_one_adapter_as_long_as_it_is_the_same_mapping() -> None:
    adapt, one, equal = StateAdapter(), new_state(), new_state()
    adapted = adapt(one)
    assert adapt(one) is adapted
    assert adapt(equal) is not adapted, "its tensors are others"
    given_already = MappingState(one)
    assert adapt(given_already) is given_already


snapshots = st.builds(SnapshotId, st.just(3), st.integers(1, 3))
permits = st.builds(Permit, snapshots, st.integers(0, 5), st.just(0), st.booleans())


@given(
    permit=st.none() | permits,
    iteration=st.integers(0, 5),
    last=st.none() | snapshots,
    busy=st.booleans(),
    declined=st.booleans(),
    went_back=st.booleans(),
)
def test_only_a_valid_permit_of_this_iteration_is_captured_and_each_is_answered_once(
    permit: Permit | None,
    iteration: int,
    last: SnapshotId | None,
    busy: bool,
    declined: bool,
    went_back: bool,
) -> None:
    due = boundary_action(
        permit, iteration, last, busy=busy, declined=declined, went_back=went_back
    )
    if permit is None:
        assert due is BoundaryAction.WAIT
        return
    if due is BoundaryAction.CAPTURE:
        assert permit.iteration == iteration and not permit.revoked and not busy
        assert not (declined and permit.snapshot.sequence == 1)
    if permit.snapshot == last:
        assert due is (BoundaryAction.REACKNOWLEDGE if permit.revoked else BoundaryAction.WAIT)
    elif permit.revoked or permit.iteration < iteration:
        assert due is BoundaryAction.MISS
    elif permit.iteration == iteration:
        assert due in (BoundaryAction.CAPTURE, BoundaryAction.MISS)
    elif not declined:
        assert due is (BoundaryAction.MISS if went_back else BoundaryAction.WAIT)


@pytest.mark.parametrize(
    ("last", "setting", "finished", "expected"),
    [
        (0, 0, None, []),
        (0, 0, True, [(2, True)]),
        (0, 0, False, [(2, False)]),
        (2, 0, None, [(2, True)]),
        (3, 0, None, [(2, False)]),
        (0, 3, None, [(2, False)]),
        (2, 3, None, [(2, True)]),
        (3, 0, True, [(2, True)]),
    ],
)
def test_the_plan_is_done_with_its_last_iteration(
    smp: FakeSmp, last: int, setting: int, finished: bool | None, expected: list[tuple[int, bool]]
) -> None:
    state = {"weight": torch.zeros(4)}
    manager = make_manager(smp, last=last, settings={"last_iteration": setting})
    manager.load(into=state)
    for iteration in (1, 2):
        manager.save(iteration, state)
    manager.close(finished=finished)
    manager.close(finished=True)
    assert smp.endings == expected


def test_a_script_that_never_closes_says_it_as_it_exits(smp: FakeSmp) -> None:
    manager = make_manager(smp, last=5)
    manager.save(5, {"weight": torch.zeros(4)})
    _say_ends()
    manager.close()
    assert smp.endings == [(5, True)]


def test_a_restart_in_process_is_no_end(smp: FakeSmp) -> None:
    make_manager(smp, last=5).save(1, {"weight": torch.zeros(4)})
    _close_all()
    assert smp.endings == []
