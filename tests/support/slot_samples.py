"""Headers of slots in each state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from tests.protocol.model.memory import record_of

SHARD = "dp0"


ONE, TWO, THREE = (SnapshotId(1, number) for number in (1, 2, 3))


ROOT = b"r".ljust(32)


TABLE = (record_of(TWO, "dp0", 20), record_of(TWO, "dp1", 20))


FREE, CAPTURING, SEALED, ENCODING, PROTECTED, COMMITTED, REBUILDING = SlotState


def header(
    state: SlotState, snapshot: SnapshotId = TWO, *, local: bool = False, ending: bool = False
) -> SlotHeader:
    """A slot as the machine would have left it in that state."""
    if state == FREE:
        return EMPTY_SLOT
    iteration = -1 if ending else 10 * snapshot.sequence
    plain = replace(EMPTY_SLOT, state=state, snapshot=snapshot, iteration=iteration)
    if state in (CAPTURING, REBUILDING):
        return plain
    sealed = replace(plain, record=record_of(snapshot, SHARD, iteration))
    if state in (SEALED, ENCODING):
        return sealed
    if local:
        return replace(sealed, local_only=True)
    return replace(sealed, parity_valid=True, parity_root=ROOT, stripe_table=TABLE)


headers = st.builds(
    header,
    st.sampled_from(SlotState),
    st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 9)),
    local=st.booleans(),
)
