"""From "something died" to "trainers may start": the steps of one new incarnation.

Each step can be interrupted: nothing that a later attempt needs is given up before the
restored snapshot is complete and committed everywhere again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.errors import ControlPlaneError, MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.connections import ARENA_TIMEOUT_SECONDS
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.plan import create_requests, orders_by_node, stripe_orders

ADMIT_TIMEOUT_SECONDS = ARENA_TIMEOUT_SECONDS + 30.0
"""For fencing a node that goes on answering heartbeats: what it was asked for before comes first,
and that may be an arena whose pages are all touched."""
REBUILD_TIMEOUT_SECONDS = 1800.0


class RebuildError(MegatronFTError):
    """A rebuild did not finish; ``corrupt`` is a shard whose bytes turned out wrong, or empty."""

    def __init__(self, reason: str, corrupt: str = "") -> None:
        super().__init__(reason)
        self.corrupt = corrupt


class IncarnationHigherError(ControlPlaneError):
    """Some SMP has already seen this incarnation; the next attempt must be higher."""


@dataclass(frozen=True)
class Admitted:
    """Who let the new incarnation in, and who did not answer."""

    inventories: dict[str, m.Inventory]
    lost: tuple[str, ...]


async def admit(coordinator: Coordinator, incarnation: int, nodes: Sequence[str]) -> Admitted:
    """Fence every node for ``incarnation`` and collect what it holds.

    A node that does not answer, is silent, or cannot confirm that its older writers are
    dead, counts as lost.  A node that still obeys another coordinator is waited for: its
    lease runs out.
    """
    reach("recovery.admitting")
    coordinator.incarnation, coordinator.resumed_from = incarnation, None
    answers = await asyncio.gather(*(_admit(coordinator, incarnation, n) for n in nodes))
    inventories = {n: a for n, a in zip(nodes, answers, strict=True) if a is not None}
    return Admitted(inventories, tuple(n for n in nodes if n not in inventories))


async def _admit(coordinator: Coordinator, incarnation: int, node: str) -> m.Inventory | None:
    request = m.Admit(incarnation, coordinator.timing.lease)
    while node in coordinator.links:
        answer = await _ask_unless_silent(coordinator, node, request)
        if isinstance(answer, m.Inventory):
            reach("recovery.between")
        if answer is None or isinstance(answer, m.Inventory):
            return answer
        if answer.error == "LeaseHeld":
            coordinator.observers.tell("waiting", f"node {node}: {answer.reason} s of lease left")
            await asyncio.sleep(float(answer.reason))
        elif answer.error == "StaleIncarnationError":
            raise IncarnationHigherError(answer.reason)
        else:
            text = f"node {node} refused incarnation {incarnation}: {answer.reason}"
            coordinator.observers.tell("refused", text, node=node)
            return None
    return None


async def _ask_unless_silent(coordinator: Coordinator, node: str, request: m.Message) -> Any:
    """The answer, or None as soon as the node has been silent for too long.

    An answer takes long where writers are hard to kill; heartbeats go on meanwhile.
    """
    question = asyncio.ensure_future(coordinator.links[node].ask(request, ADMIT_TIMEOUT_SECONDS))
    try:
        while not question.done():
            await asyncio.wait({question}, timeout=coordinator.timing.heartbeat)
            if coordinator.silent_nodes([node]):
                return None
        return None if question.cancelled() else question.result()
    except ControlPlaneError:
        return None
    finally:
        question.cancel()


@dataclass(frozen=True)
class DiskSource:
    """A drained checkpoint that a recovery takes, and the shards that come from it.

    ``fresh`` says that no arena stays, since memory can serve nothing.
    """

    folder: Path
    shards: tuple[str, ...]
    fresh: bool


@dataclass(frozen=True)
class Restore:
    """The input of one restore: a decision, where shards live now, and the new lineage.

    ``disk`` is set where the snapshot comes from a drained checkpoint.  ``framework_loads`` says
    that trainers load a checkpoint of the framework's own instead; memory keeps what it has.
    """

    decision: Decision
    places: dict[str, str]
    active: tuple[str, ...]
    incarnation: int
    lineage: tuple[Ancestor, ...]
    slot_count: int
    disk: DiskSource | None = None
    framework_loads: bool = False

    def adoption(self, node: str) -> m.Adopt:
        """What ``node`` keeps: its shards if something is restored, else nothing."""
        snapshot = self.decision.snapshot
        kept = snapshot is not None and not (self.disk is not None and self.disk.fresh)
        keep = tuple(s for s, n in self.places.items() if n == node and kept)
        return m.Adopt(self.incarnation, self.lineage, snapshot, keep)

    def sources(self) -> dict[str, str]:
        """Where each shard's bytes come from: "memory" of its own node, "parity" or "disk"."""
        lost = dict.fromkeys(self.lost(), "parity")
        disk = dict.fromkeys(() if self.disk is None else self.disk.shards, "disk")
        return {**dict.fromkeys(self.places, "memory"), **lost, **disk}

    def lost(self) -> tuple[str, ...]:
        """Shards that must be rebuilt from parity."""
        return tuple(shard for members in self.decision.lost.values() for shard in members)


def describe_restore(plan: Restore) -> tuple[str, str]:
    """What a restore does as a sentence, and in a word where the bytes come from."""
    start = f"restoring iteration {plan.decision.iteration}"
    if plan.disk is not None:
        rest = "" if plan.disk.fresh else ", the rest from own memory"
        return f"{start}: {_names(plan.disk.shards)} from disk ({plan.disk.folder}){rest}", "disk"
    if plan.lost():
        return f"{start}: {', '.join(plan.lost())} from parity, the rest from own memory", "parity"
    return f"{start} from own memory", "own memory"


def _names(shards: Sequence[str]) -> str:
    return ", ".join(shards) if len(shards) <= 4 else f"{len(shards)} shards"


async def restore(
    coordinator: Coordinator,
    plan: Restore,
    admitted: Sequence[str],
    world_up: Callable[[], None],
    load: Callable[[DiskSource], Awaitable[None]],
) -> None:
    """Carry a decision out: adopt the lineage, bring back what is lost, commit, let trainers in.

    ``world_up`` starts an encoder world over the active nodes, ``load`` fills the slots that
    wait for shards from disk.  RebuildError when some shard could not be rebuilt, NoRoomError
    when a node has no room for one; another incarnation then tries again.
    """
    snapshot = plan.decision.snapshot
    coordinator.restoring = snapshot
    await coordinator.ask_all({node: plan.adoption(node) for node in admitted})
    reach("recovery.adopted")
    if snapshot is not None and plan.decision.lost:
        await _make_targets(coordinator, plan, plan.lost())
        world_up()
        await coordinator.world_ready(120.0)
        await _rebuild(coordinator, plan, snapshot)
    if snapshot is not None and plan.disk is not None:
        await _make_targets(coordinator, plan, plan.disk.shards)
        await coordinator.ask_all(_load_requests(plan, plan.disk, snapshot))
        await load(plan.disk)
    if snapshot is not None:
        level = "protected" if plan.decision.protected else "local"
        commit = m.Commit(plan.incarnation, snapshot, level)
        reach("recovery.committing")
        await coordinator.ask_all({node: commit for node in plan.active})
        coordinator.record_commit(snapshot, plan.decision.iteration, level)
    ready = m.RestoreReady(plan.incarnation, snapshot, plan.sources())
    await coordinator.ask_all({node: ready for node in plan.active})
    coordinator.resumed_from = plan.decision.iteration if snapshot is not None else -1
    if snapshot is not None:
        reach("recovery.ready")


async def _make_targets(coordinator: Coordinator, plan: Restore, shards: Sequence[str]) -> None:
    """Arenas for these shards, where their node has none yet; all nodes at once."""
    requests = create_requests(
        plan.decision.stripes, plan.incarnation, plan.lineage, plan.slot_count
    )

    async def make(node: str) -> None:
        for shard_id in shards:
            if plan.places[shard_id] == node:
                await coordinator.links[node].make_arena(requests[shard_id])

    await asyncio.gather(*(make(node) for node in {plan.places[s] for s in shards}))


def _load_requests(plan: Restore, disk: DiskSource, snapshot: SnapshotId) -> dict[str, m.Load]:
    by_node: dict[str, list[str]] = {}
    for shard_id in disk.shards:
        by_node.setdefault(plan.places[shard_id], []).append(shard_id)
    return {
        node: m.Load(plan.incarnation, snapshot, plan.decision.iteration, tuple(shards))
        for node, shards in by_node.items()
    }


async def _rebuild(coordinator: Coordinator, plan: Restore, snapshot: SnapshotId) -> None:
    missing = {shard for members in plan.decision.lost.values() for shard in members}
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listen(event: m.Event) -> None:
        body = event.body
        # What is told late of the encoders before these says nothing of them.
        world = coordinator.world
        if isinstance(body, m.Rebuilt) and body.snapshot == snapshot:
            missing.discard(body.shard_id)
            if not missing and not done.done():
                done.set_result(None)
        elif isinstance(body, m.OrderFailed) and body.world == world and not done.done():
            done.set_exception(RebuildError(body.reason, body.corrupt))
        elif isinstance(body, m.WriterGone) and (body.role, body.who) == ("encoder", world):
            reason = f"the encoder on {event.node} died while rebuilding"
            asyncio.get_running_loop().call_later(1.0, _fail, done, reason)

    orders = stripe_orders(plan.decision.stripes, plan.places, plan.active, plan.decision.lost)
    parts = orders_by_node(orders, plan.places)
    iteration = plan.decision.iteration
    requests = {
        node: m.Rebuild(
            plan.incarnation, snapshot, iteration, coordinator.world, parts.get(node, ())
        )
        for node in plan.active
    }
    coordinator.listeners.append(listen)
    try:
        await coordinator.ask_all(requests)
        await asyncio.wait_for(done, REBUILD_TIMEOUT_SECONDS)
    except asyncio.TimeoutError as error:
        raise RebuildError(f"no end of the rebuild of {', '.join(sorted(missing))}") from error
    finally:
        coordinator.listeners.remove(listen)


def _fail(done: asyncio.Future[None], reason: str) -> None:
    """An encoder's own account of what went wrong arrives before this and wins."""
    if not done.done():
        done.set_exception(RebuildError(reason))
