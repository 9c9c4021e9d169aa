"""What a rank does at an iteration boundary, over all permits it can see."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SnapshotId
from megatron_ft.trainer.capture import BoundaryAction, boundary_action

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
