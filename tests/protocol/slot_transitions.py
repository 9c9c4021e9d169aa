"""Every transition that ShardSlots makes, found by asking each method in each state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.core.errors import TransitionRefusedError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.smp.slots import ShardSlots
from tests.protocol.model.memory import record_of

OLD, NEW, NEXT = SnapshotId(1, 1), SnapshotId(1, 2), SnapshotId(1, 3)
RECORD = record_of(OLD, "dp0", 1)
NEWER = replace(EMPTY_SLOT, state=SlotState.COMMITTED, snapshot=NEW, iteration=2, parity_valid=True)
Transition = tuple[str, str, str]
"""State, method, state."""

ASK: dict[str, Callable[[ShardSlots], object]] = {
    "begin_capture": lambda slots: (slots.grant(NEXT, 3), slots.begin_capture(NEXT)),
    "seal": lambda slots: slots.seal(RECORD),
    "capture_ended": lambda slots: slots.capture_ended(),
    "begin_encode": lambda slots: slots.begin_encode(OLD),
    "protect": lambda slots: slots.protect(OLD, bytes(32), (RECORD,)),
    "encoder_gone": lambda slots: slots.encoder_gone(),
    "commit": lambda slots: slots.commit(OLD, local_only=False),
    "commit local": lambda slots: slots.commit(OLD, local_only=True),
    "abort": lambda slots: slots.abort(OLD, trainer_alive=False, encoder_alive=False),
    "begin_rebuild": lambda slots: slots.begin_rebuild(OLD, 1),
    "rebuilt": lambda slots: slots.rebuilt(RECORD, bytes(32), (RECORD,)),
    "loaded": lambda slots: slots.loaded(RECORD),
    "forget": lambda slots: slots.forget(lambda snapshot: snapshot == OLD),
}


def transitions() -> set[Transition]:
    """All of them; beside a newer committed snapshot, so that this slot may be reused."""
    found = set()
    for header in _headers():
        for name, ask in ASK.items():
            slots = ShardSlots("dp0", [header, NEWER])
            try:
                ask(slots)
            except TransitionRefusedError:
                continue
            after = slots.slots[0]
            if after.state != header.state:
                found.add((header.state.name, name, after.state.name))
    return found


def _headers() -> list[SlotHeader]:
    known = replace(EMPTY_SLOT, snapshot=OLD, iteration=1, record=RECORD)
    local = (SlotState.COMMITTED, SlotState.ENCODING)
    return [
        EMPTY_SLOT,
        *(replace(known, state=s) for s in SlotState if s != SlotState.FREE),
        *(replace(known, state=s, local_only=True) for s in local),
    ]


def figure() -> str:
    """The transitions as a Mermaid diagram, methods of one arrow together."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for before, name, after in sorted(transitions()):
        arrows.setdefault((before, after), []).append(name)
    lines = [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in sorted(arrows.items())]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> FREE", *lines, "```"])


if __name__ == "__main__":
    print(figure())
