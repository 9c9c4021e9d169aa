"""The number of slots of a job's arenas: as given, or chosen when arenas are made anew.

A drain reads one slot for as long as the disk takes.  With a third one snapshots continue
meanwhile.  It costs half as much memory again, so it is taken only where every node keeps as
much free beside it.  All arenas of a job have the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.arena.limits import format_bytes
from megatron_ft.checkpoint.decide import Decision, StripeState
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.orders import bytes_by_node, create_requests
from megatron_ft.supervisor.spec import JobSpec

USUAL, BESIDE_DRAINS = 2, 3


@dataclass(frozen=True)
class SlotChoice:
    """Slots of each arena, and why there are no more beside drains; 0: not chosen yet."""

    count: int = 0
    reason: str = ""


def present_slots(decision: Decision) -> SlotChoice:
    """The slots of the arenas that hold a snapshot; not chosen if there are none."""
    count = max((len(held.arena.slots) for held in decision.holdings.values()), default=0)
    return SlotChoice(count, "the job's arenas were made with two, and keep them")


async def choose_slots(
    fleet: Fleet,
    spec: JobSpec,
    stripes: Sequence[StripeState],
    places: Mapping[str, str],
    spares: Collection[str],
) -> SlotChoice:
    """The slots of arenas that are made anew on the nodes of ``places``.

    ``spares`` may take the place of any node, so they must have as much room.
    """
    given = spec.settings.fixed_slots
    if given or spec.settings.drain_dir is None:
        return SlotChoice(given or USUAL, "with --slots 3 snapshots continue")
    needs = bytes_by_node(create_requests(stripes, 1, (), BESIDE_DRAINS + 1), places)
    asked = m.RoomRequest(fleet.incarnation)
    try:
        rooms = await fleet.ask_all(dict.fromkeys({*needs, *spares}, asked))
    except ControlPlaneError as error:
        return SlotChoice(USUAL, f"the free memory is not known ({error})")
    reason = too_small(needs, rooms)
    return SlotChoice(USUAL, reason) if reason else SlotChoice(BESIDE_DRAINS)


def too_small(needs: Mapping[str, int], rooms: Mapping[str, m.Room]) -> str:
    """The node without the memory that a third slot takes, in words; "" if there is none.  Pure.

    ``needs`` are bytes by node; a node that is not in it may come to need as much as any.
    Nodes on one machine share its memory.
    """
    together: dict[str, int] = {}
    for node, need in needs.items():
        machine = rooms[node].machine
        together[machine] = together.get(machine, 0) + need
    most = max(needs.values(), default=0)
    for node, room in sorted(rooms.items()):
        need = max(together.get(room.machine, 0), most)
        if room.available < need:
            return (
                f"a third one is made only where as much memory stays free: with that {node} "
                f"needs {format_bytes(need)}, and {room.limit} leaves "
                f"{format_bytes(max(0, room.available))}"
            )
    return ""
