"""Admission: fences nodes for a new incarnation, so that nothing of an older one writes there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from megatron_ft.core.errors import ArenaForeignError, ControlPlaneError, StaleIncarnationError
from megatron_ft.core.fault_points import reach
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.smp_link import ARENA_TIMEOUT_SECONDS

ADMIT_TIMEOUT_SECONDS = ARENA_TIMEOUT_SECONDS + 30.0
"""Limit for fencing a node that still answers heartbeats.  Its earlier requests come first, which
may include an arena whose pages are all touched."""


Inventories = dict[str, m.Inventory]
"""Inventory of each node that was admitted into the present incarnation, by node."""

LivingRanks = Mapping[str, Sequence[int]]
"""Ranks whose trainers live and could restart in their process, by node."""


def kept_ranks(admitted: Inventories) -> tuple[int, ...]:
    """Ranks whose process was released and waits to train again."""
    return tuple(rank for inventory in admitted.values() for rank in inventory.kept)


def owned_arenas(admitted: Inventories, places: Mapping[str, str]) -> list[m.Inventory]:
    """Inventories reduced to the arenas whose shard has its place there."""
    return [
        msgspec.structs.replace(
            inventory,
            arenas=tuple(a for a in inventory.arenas if places.get(a.shard_id) == node),
        )
        for node, inventory in admitted.items()
    ]


def check_inventories(fleet: Fleet, admitted: Inventories) -> None:
    """Emit what is damaged; ArenaForeignError for arenas of another job, which stay as they are."""
    foreign = [text for i in admitted.values() for text in i.foreign]
    if foreign:
        raise ArenaForeignError(
            f"{len(foreign)} arenas in this job's folders are not its own: {foreign[0]}. If "
            "they are of an earlier run of this job, run it with the same --state-dir; else "
            "choose another --job name, or remove them with `megatron-ft clean`"
        )
    for node, inventory in admitted.items():
        for rank, why in inventory.renewed.items():
            text = f"rank {rank} starts in a new process: it {why}"
            fleet.observers.emit("new_process", text, rank=rank, node=node)
        for text in inventory.damaged:
            fleet.observers.emit("damaged", f"node {node}: {text}", node=node)
        fleet.hanging_drains.note(node, inventory.hanging)


async def admit(
    fleet: Fleet, incarnation: int, nodes: Sequence[str], keep: LivingRanks
) -> Inventories:
    """Fence every node for ``incarnation`` and collect what it holds.

    Trainers of ``keep`` may live, if they provably let go of their arenas.  A node that does not
    answer, is silent, or cannot confirm that its older writers are gone, counts as lost.  A node
    that still obeys another supervisor is waited for: its lease runs out.
    """
    reach("recovery.admitting")
    fleet.begin_incarnation(incarnation)
    requests = [
        m.Admit(incarnation, fleet.timing.lease, tuple(keep.get(node, ()))) for node in nodes
    ]
    answers = await asyncio.gather(*map(partial(_admit, fleet), nodes, requests))
    return {n: a for n, a in zip(nodes, answers, strict=True) if a is not None}


async def _admit(fleet: Fleet, node: str, request: m.Admit) -> m.Inventory | None:
    while node in fleet.links:
        answer = await _ask_unless_silent(fleet, node, request)
        if isinstance(answer, m.Inventory):
            reach("recovery.between")
        if answer is None or isinstance(answer, m.Inventory):
            return answer
        if isinstance(answer, m.LeaseHeld):
            left = answer.seconds
            text = f"waiting {left:.0f} s for the end of an older supervisor's lease on {node}"
            fleet.observers.emit("waiting", text)
            await asyncio.sleep(left)
        elif isinstance(answer.error, StaleIncarnationError):
            raise IncarnationHigherError(answer.reason)
        else:
            text = f"node {node} refused incarnation {request.incarnation}: {answer.reason}"
            fleet.observers.emit("refused", text, node=node)
            return None
    return None


async def _ask_unless_silent(fleet: Fleet, node: str, request: m.Message) -> Any:
    """The answer, or None as soon as the node has been silent for too long.

    An answer takes long where writers are hard to kill; heartbeats continue meanwhile.
    """
    question = asyncio.ensure_future(fleet.links[node].ask(request, ADMIT_TIMEOUT_SECONDS))
    try:
        while not question.done() and not fleet.silent_nodes([node]):
            await asyncio.wait({question}, timeout=fleet.timing.heartbeat)
        return question.result() if question.done() and not question.cancelled() else None
    except ControlPlaneError:
        return None
    finally:
        question.cancel()


class IncarnationHigherError(ControlPlaneError):
    """An SMP has already seen this incarnation; the next attempt must be higher."""
