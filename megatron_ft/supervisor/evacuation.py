"""Planned moves: ranks move to a spare, or to fewer or more nodes; no iteration is lost.

A user asks for an evacuation, an SMP that got SIGTERM, or a scheduler that drains a node.  Where no
spare is left the job shrinks, if it may; it grows again when nodes are back.  The next iteration
boundary is captured, and trainers stay there until the snapshot is committed with parity.  Then
this incarnation ends, and the next one begins with the other nodes.  A job without parity can only
grow: all nodes that hold its snapshot stay.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import SnapshotEnded
from megatron_ft.supervisor.elastic import more_nodes, nodes_without
from megatron_ft.supervisor.ends import Asked
from megatron_ft.supervisor.health import Health
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.restore import RestorePlan

STAY_SECONDS = 30.0
"""Longest time that trainers stay at the captured boundary; then they train on."""

AHEAD_SECONDS = 0.25
"""The boundary lies so far ahead that no rank passes it before it knows; doubled at each try."""

GROW_AGAIN_SECONDS = 60.0
"""Time from one growth of a job to the next; doubled each time, as nodes may come and go."""

TRIES = 3
PATIENCE_SECONDS = 600.0
"""Longest wait for a snapshot: encoders may be away, or readers hold all slots."""

SETTLE_SECONDS = 1.0
"""Wait for more notices: a signal to the whole job reaches one node after the other."""

POLL_SECONDS = 5.0
"""Interval of looks at what the scheduler says of the nodes."""


@dataclass(frozen=True)
class Seating:
    """State of a job when an evacuation is asked for.

    ``spares`` are the nodes that could take over, ``wanted`` those that shall leave, which no
    ranks move to; ``fewer`` those with which the job could continue without a spare, ``not_fewer``
    the reasons if there are none.
    """

    active: Collection[str]
    others: Collection[str]
    spares: Collection[str]
    wanted: Collection[str]
    redundant: bool
    paused: bool
    stopping: bool
    fewer: Collection[str] = ()
    not_fewer: Sequence[str] = ()

    @property
    def free(self) -> set[str]:
        """Spares that stay."""
        return set(self.spares) - set(self.wanted)

    def against(self, node: str) -> str:
        """Reason why ``node`` cannot be evacuated now, or "".  Pure."""
        if node not in self.active and node not in self.others:
            return f"this job has no such node; it has {', '.join(sorted(self.active))}"
        if self.stopping:
            return "the job is being stopped"
        if node not in self.active:
            return ""
        if not self.redundant:
            return "--protect none leaves no copy from which another node could have its shards"
        if self.paused:
            return "snapshots are paused; `megatron-ft resume` first"
        if self.free or self.fewer:
            return ""
        also = ", ".join(sorted(set(self.spares) & set(self.wanted)))
        text = "no spare is left" + (f": {also} shall leave, too" if also else "")
        return "; not with ".join([text, *self.not_fewer])


def boundaries_ahead(seconds: float, iteration_seconds: float) -> int:
    """Number of iterations in ``seconds``; 0 while the time of one is unknown.  Pure."""
    return math.ceil(seconds / max(iteration_seconds, 1e-6)) if iteration_seconds > 0 else 0


def loss_of_move(
    ended: SnapshotEnded, reached: int, survives: SnapshotId | None, redundant: bool = True
) -> str:
    """Reason why moving ranks now would lose work, or "" if it would lose none.  Pure.

    ``reached`` is the last iteration that any rank has finished, ``survives`` the newest snapshot
    that survives the loss of a node; in a job that is not ``redundant``, that of trainers.
    """
    if ended.level not in ("protected", "protected" if redundant else "local"):
        return ended.reason or f"the snapshot of iteration {ended.iteration} has no parity"
    if reached > ended.iteration:
        return f"trainers did not stay at iteration {ended.iteration} until it was committed"
    if survives != ended.snapshot:
        return f"iteration {ended.iteration} would not survive the move"
    return ""


class Evacuations:
    """The evacuations of one job over all its incarnations, one at a time.

    With ``stopping`` none begins any more.
    """

    def __init__(self, job: JobContext, health: Health) -> None:
        self.stopping, self._stayed = False, 0.0
        self._job, self._growths, self._grow_after = job, 0, 0.0
        self._launcher, self._members = job.launcher, job.members
        self._fleet, self._standing, self._pump = job.fleet, job.standing, job.pump
        self._group, self._health = job.encoder_group, health
        self._redundant = bool(job.spec.scheme.parity_members)
        self._drained: set[str] = set()
        self._moving: tuple[m.Evacuate, int] | None = None
        """The request under way, and the node's position."""
        for node in job.members.seats.evacuated:
            job.fleet.evacuations.note_move(node, state="moved", text=f"{node} is evacuated")

    def stop(self) -> None:
        self.stopping = True

    async def until_due(self) -> Asked:
        """Answer requests; returns when this incarnation must end so that a spare takes over."""
        while True:
            request = await self._next()
            if request is None:
                if await self._grow():
                    return Asked("nodes are back", self._stayed)
                continue
            node, seating = request.node, self._seating(request.node)
            reason = seating.against(node)
            if request.undo:
                self._undo(request)
                continue
            if request.reason == m.IF_UNHEALTHY and node in self._launcher.nodes():
                reason = await self._health.why_not_unhealthy(node) or reason
            moves = not reason and node in self._members.active
            if moves:
                self._note(request, "moving", f"{node} is being evacuated ({request.reason})")
                if seating.free:
                    await self._group.prepare(self._members.active_without(node))
                reason = await self._capture()
                seating = self._seating(node)
                reason = reason or seating.against(node)
            if reason:
                self._pump.permit_again()
                self._group.drop_prepared()
                self._refuse(request, reason)
                continue
            self._members.take(self._members.seats.evacuate(node))
            if moves:
                self._moving = request, self._members.active.index(node)
                if not seating.free:
                    self._continue_on("shrunk", f"{node} leaves", list(seating.fewer))
                return Asked(f"{node} is evacuated", self._stayed)
            self._note(request, "moved", f"{node} had no ranks; it is not a spare any more")

    def restored(self, plan: RestorePlan) -> None:
        """An incarnation is about to train: all that it needs is where its nodes are."""
        if self._moving is None:
            return
        self._members.take(self._members.seats.moved())
        (request, position), self._moving = self._moving, None
        node, spare = request.node, plan.active[min(position, len(plan.active) - 1)]
        if node in plan.active:
            other = "another node" if plan.reshaped else "the spare"
            self._refuse(request, f"{other} was lost meanwhile")
        else:
            lost = max(0, plan.reached - plan.decision.iteration)
            where = f"{spare} has its ranks"
            if plan.reshaped:
                where = f"{len(plan.active)} nodes have its state"
            text = f"{node} is evacuated: {where}, {lost} iterations are lost"
            self._note(request, "moved", text)

    async def _next(self) -> m.Evacuate | None:
        """The oldest request, None if the job could grow; the scheduler tells nobody."""
        fleet = self._fleet
        while not fleet.evacuations.waiting:
            if not await fleet.evacuations.until_asked(POLL_SECONDS):
                await self._look()
            larger = await asyncio.to_thread(self._larger)
            if larger and not fleet.evacuations.waiting:
                return None
        request = next(iter(fleet.evacuations.waiting.values()))
        if request.reason not in (m.ON_REQUEST, m.IF_UNHEALTHY):
            await asyncio.sleep(SETTLE_SECONDS)
            await fleet.refresh()
        return request

    async def _look(self) -> None:
        leaving = await asyncio.to_thread(self._launcher.leaving)
        if leaving is None:
            return
        for node in sorted(leaving.keys() - self._drained):
            reason = f"the scheduler drains it: {leaving[node]}".strip(": ")
            self._fleet.evacuations.ask(m.Evacuate(node, uuid.uuid4().hex, reason[:256]))
        self._drained = set(leaving)

    def _seating(self, node: str) -> Seating:
        requests = self._fleet.evacuations.waiting.values()
        wanted = self._members.seats.leaving | {r.node for r in requests if not r.undo}
        fewer, not_fewer = nodes_without(
            self._members.seats, self._job.state.record.rank_rule, wanted | {node}
        )
        return Seating(
            active=self._members.active,
            others=self._launcher.nodes(),
            spares=self._members.free_spares(),
            wanted=wanted,
            fewer=fewer,
            not_fewer=not_fewer,
            redundant=self._redundant,
            paused=self._pump.paused,
            stopping=self.stopping,
        )

    async def _grow(self) -> bool:
        """Grow the job to the nodes that are back; True if it will."""
        self._grow_after = time.monotonic() + GROW_AGAIN_SECONDS * 2**self._growths
        emit = self._fleet.observers.emit
        chosen = self._more_of(await self._members.answering(self._reachable()))
        self._growths += 1
        reason = await self._capture() if chosen else "no other node answers"
        if reason:
            self._pump.permit_again()
            emit("not_grown", f"the job stays with {len(self._members.active)} nodes: {reason}")
            return False
        self._continue_on("grown", "nodes are back", chosen)
        return True

    def _continue_on(self, kind: str, reason: str, chosen: list[str]) -> None:
        """Have the next incarnation train on these nodes, fewer or more than now."""
        before = len(self._members.active)
        self._members.train_on(chosen)
        text = f"{reason}: continuing with {len(chosen)} instead of {before}"
        text += f", {self._members.seats.ranks} ranks: {', '.join(chosen)}"
        self._fleet.observers.emit(kind, text, nodes=chosen, ranks=self._members.seats.ranks)

    def _larger(self) -> list[str]:
        """The nodes with which the job could grow now; empty if it cannot, or shall not yet."""
        standing = self._standing
        if self._pump.paused or self.stopping or time.monotonic() < self._grow_after:
            return []
        if (standing.protected if self._redundant else standing.committed) is None:
            return []
        return self._more_of(self._reachable())

    def _more_of(self, there: Collection[str]) -> list[str]:
        return more_nodes(self._members.seats, self._job.state.record.rank_rule, there)

    def _reachable(self) -> list[str]:
        return list(filter(self._launcher.reachable, self._launcher.nodes()))

    async def _capture(self) -> str:
        """Have a boundary committed at which trainers stay; the reason if that fails, or ""."""
        fleet, pump, reason = self._fleet, self._pump, ""
        for attempt in range(TRIES):
            pump.permit_again()
            usual = fleet.heartbeats.iteration_seconds
            ahead = boundaries_ahead(AHEAD_SECONDS * 2**attempt, usual)
            capture = pump.capture_and_stop(ahead, STAY_SECONDS)
            try:
                ended = await asyncio.wait_for(capture, PATIENCE_SECONDS)
            except asyncio.TimeoutError:
                return f"no snapshot could be taken in {PATIENCE_SECONDS:.0f} s"
            await fleet.refresh()
            reached = max(fleet.progress.values(), default=-1)
            found = pump.fallbacks()
            safe = found.node_loss if self._redundant else found.crash
            survives = None if safe is None else safe.snapshot
            reason = loss_of_move(ended, reached, survives, self._redundant)
            if not reason:
                self._note_stay()
                return ""
        return reason

    def _note_stay(self) -> None:
        ranks, now = self._members.seats.ranks, time.monotonic()
        heard = self._fleet.heartbeats.fresh(ranks, STAY_SECONDS)
        self._stayed = min((one.idle(now) for one in heard), default=0.0)

    def _undo(self, request: m.Evacuate) -> None:
        node = request.node
        if node not in self._members.seats.evacuated:
            self._refuse(request, "it was not evacuated")
            return
        self._members.take(self._members.seats.take_back(node))
        self._note(request, "undone", f"{node} is a spare again")

    def _refuse(self, request: m.Evacuate, reason: str) -> None:
        self._note(request, "refused", f"{request.node} is not evacuated: {reason}")

    def _note(self, request: m.Evacuate, state: str, text: str) -> None:
        """Emit what became of a request, and have the command that made it know."""
        fleet = self._fleet
        if state != "moving":
            fleet.evacuations.answer(request.number)
        fleet.evacuations.note_move(request.node, number=request.number, state=state, text=text)
        kind = {"moving": "evacuating", "moved": "evacuated", "refused": "not_evacuated"}
        end = "; training continues" if state == "refused" else ""
        fleet.observers.emit(kind.get(state, state), text + end, node=request.node)
