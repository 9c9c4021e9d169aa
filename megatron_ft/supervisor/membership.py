"""Membership of a job's nodes: which train, which a recovery admits, and who replaces lost ones.

Admission fences a node for a new incarnation, so that nothing of an older one writes there any
more.  Nodes that cannot be reached may train until their leases have run out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from msgspec.structs import replace

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import (
    ControlPlaneError,
    MegatronFTError,
    NoRoomError,
    SchedulerAwayError,
    StaleIncarnationError,
)
from megatron_ft.launchers.launcher import Launcher, NodeUnreachable
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.admission import (
    IncarnationHigherError,
    Inventories,
    LivingRanks,
    admit,
    check_inventories,
    owned_arenas,
)
from megatron_ft.supervisor.ends import Failure, Interrupted, NodeLost, SmpLost, first_end
from megatron_ft.supervisor.events import NodeLostEvent, SpareLostEvent
from megatron_ft.supervisor.job_state import JobState, homes_of
from megatron_ft.supervisor.processes import Result, SmpFleet
from megatron_ft.supervisor.seats import Seats, first_active, other_size, stripes_by_position
from megatron_ft.supervisor.snapshots import SnapshotPump
from megatron_ft.supervisor.spec import JobSpec

log = logging.getLogger(__name__)


class NoSpareError(MegatronFTError):
    """A node is lost and no spare is left to take its place.

    ``admitted`` are the nodes that are left, ``missing`` is how many hosts would do.
    """

    def __init__(self, reason: str, admitted: Inventories, missing: int = 1) -> None:
        super().__init__(reason)
        self.admitted, self.missing = admitted, missing


class Membership:
    """The nodes of one job over all its incarnations: what follows from ``seats``, and why."""

    def __init__(
        self, spec: JobSpec, launcher: Launcher, state: JobState, pump: SnapshotPump
    ) -> None:
        self.smps = SmpFleet(launcher, state, spec)
        self.seats = Seats.noted(spec, state.record, launcher.nodes())
        self._spec, self._launcher, self._state = spec, launcher, state
        self._pump, self._fleet = pump, pump.fleet
        # When a node that was given up was last heard of.  The supervisor before this one may have
        # renewed the lease of others until this one began.
        self._began, self._heard = time.monotonic(), dict[str, float]()
        self._led = False
        self._other_layout = False
        if other_size(spec, state.record, launcher.nodes()):
            # In the order of ranks: notes have shards in the order in which they registered.
            seats, sources = state.record.source_seats, state.record.sources
            before = [sources[s] for s in sorted(sources, key=lambda s: seats[s].rank)]
            self.train_on(first_active(spec, launcher.nodes(), [*before, *self.active]))

    @property
    def active(self) -> list[str]:
        return list(self.seats.active)

    def take(self, seats: Seats) -> None:
        """Have these seats from now on; a later supervisor knows who shall not train."""
        leaving, last_resort = seats.leaving, seats.last_resort & seats.leaving
        evacuated, avoided = tuple(sorted(leaving)), tuple(sorted(last_resort))
        record = self._state.record
        if (evacuated, avoided) != (record.evacuated, record.avoided):
            self._state.update(evacuated=evacuated, avoided=avoided)
        self.seats = seats

    def places(self, active: Sequence[str] = ()) -> dict[str, str]:
        """Shard to node, as far as shards are known from earlier incarnations.

        ``active`` are other nodes by position than those that train.
        """
        return homes_of(self._state.record.shards, active or self.seats.active)

    def source_places(self, admitted: Inventories) -> dict[str, str]:
        """Node of each shard of an older layout; those of lost nodes go to others in turn."""
        there, holders = self.seats.usable(admitted), self.seats.holders(admitted)
        places = self._state.record.sources
        lost = itertools.count()
        return {
            shard: node if node in holders else there[next(lost) % len(there)]
            for shard, node in places.items()
        }

    async def admit_all(self, keep: LivingRanks) -> Inventories:
        """Start a new incarnation on every node that can be reached; ``keep`` as for ``admit``.

        Nodes that cannot be, and may still run trainers, are waited for: their leases end.
        StaleIncarnationError when somebody else leads the job by now.
        """
        self._fleet.require_lead()
        incarnation = max(self._state.record.incarnation, self._fleet.incarnation) + 1
        nodes = await self._reachable()
        while True:
            try:
                work = admit(self._fleet, incarnation, nodes, keep)
                admitted = await self.smps.while_all_run(work)
                check_inventories(self._fleet, admitted)
                await self._await_leases(admitted)
                self._fleet.require_lead()
                self._led = True
                return admitted
            except IncarnationHigherError as error:
                if self._led:
                    raise StaleIncarnationError(
                        f"another supervisor has led this job meanwhile: {error}"
                    ) from error
                incarnation += 1

    async def _await_leases(self, admitted: Inventories) -> None:
        """Return once no trainer of an earlier incarnation can run on a node that was not
        admitted."""
        away = [n for n in self.active if n not in admitted and not self._launcher.gone(n)]
        for node in away:
            self._give_up(node)
        last = max((self._heard.get(node, self._began) for node in away), default=0.0)
        # Longer than any lease.
        seconds = last + self._fleet.timing.node_timeout - time.monotonic()
        if self._state.record.incarnation and seconds > 0:
            names = ", ".join(away)
            text = f"waiting {seconds:.0f} s for the end of any lease on {names}"
            self._emit("waiting", text, names)
            await asyncio.sleep(seconds)

    def replace_lost(self, admitted: Inventories) -> None:
        """Put a spare in the position of each lost node; NoSpareError if there are too few.

        Spares of failure domains that keep the rule of stripes, as far as there are some.
        """
        seats = self.seats
        lost, spares = seats.lost(admitted), seats.substitutes(admitted)
        for node in [node for node in lost if node not in seats.aside]:
            self._give_up(node)
            self._fleet.observers.emit(NodeLostEvent(node=node), f"node {node} is lost")
        if len(spares) < len(lost):
            raise self._no_spare(lost, admitted, len(lost) - len(spares))
        stripes = self._stripes({a.members for i in admitted.values() for a in i.arenas})
        chosen = seats.replacements(lost, spares, stripes)
        for node, spare in chosen.items():
            self._emit("spare", f"{spare} takes the place of {node}", spare)
        self.take(seats.replaced(chosen))
        most = self._spec.scheme.parity_members
        for name, nodes in self.seats.crowded(stripes) if chosen else ():
            text = f"{', '.join(nodes)} of failure domain {name} share a stripe that survives "
            self._emit("crowded", f"{text}the loss of {most}: no spare of another is left", name)

    def _no_spare(self, lost: list[str], admitted: Inventories, missing: int) -> NoSpareError:
        away, aside = ", ".join(sorted(self.seats.evacuated)), self.seats.aside
        back = f"; or give {away} back: `megatron-ft evacuate --undo`" if away else ""
        why = [f"node {node} lost" for node in lost if node not in aside]
        why += [f"no room on {node}" for node in sorted(aside)]
        return NoSpareError(
            f"{', '.join(why)}, and no spare is left; its memory may still be rebuilt: start "
            f"the same command again with more --spares{back}",
            admitted,
            missing,
        )

    def _stripes(self, members: Collection[Sequence[str]]) -> list[frozenset[int]]:
        """The stripes by position; ``members`` are theirs."""
        seats, per_node = self._state.record.shards, self._spec.ranks_per_node
        return stripes_by_position(members, {s: seat.rank // per_node for s, seat in seats.items()})

    def active_without(self, node: str) -> list[str]:
        """The nodes that would train next if ``node`` were evacuated; there must be a spare."""
        cycle, free = self._pump.cycle, set(self.free_spares())
        members = {stripe.members for stripe in cycle.stripes} if cycle is not None else set()
        spares = [name for name in self._launcher.nodes() if name in free]
        chosen = self.seats.replacements([node], spares, self._stripes(members))
        return list(self.seats.replaced(chosen).active)

    def train_on(self, nodes: Sequence[str]) -> None:
        """These nodes train from now on, and the others are spares.

        The shards in memory become sources: the next incarnation reshapes them.
        """
        self.make_sources()
        self._state.update(active=tuple(nodes))
        self.seats = self.seats.train_on(nodes)

    def reshape(self) -> None:
        """Have the next incarnation reshape what is in memory: its ranks have another layout."""
        self._other_layout = True
        self.make_sources()

    def make_sources(self) -> None:
        """Note that the shards in memory are of an older layout from now on."""
        seats = self._state.record.shards
        if seats:
            self._state.update(sources=self.places(), source_seats=seats, shards={})

    def fit_again(self, admitted: Inventories, stripes: Iterable[StripeState]) -> bool:
        """True if the older layout, of these ``stripes``, may be the present one again.

        So it is for as many ranks, whose shards are where they were: the command that did not
        fit was given up, or larger arenas were not finished.  If the ranks turn out to have another
        layout, ``reshape`` follows.  The notes say so once all nodes have made the sources arenas:
        ``returned``.
        """
        record, there = self._state.record, self.seats.usable(admitted)
        seats = record.source_seats
        if self._other_layout or len(seats) != self.seats.ranks:
            return False
        homes = homes_of(seats, self.active)
        moved = any(homes[s] != node for s, node in record.sources.items() if node in there)
        if moved or any(s.parity_members != self.seats.scheme.parity_members for s in stripes):
            return False
        return True

    def source_homes(self) -> dict[str, str]:
        return homes_of(self._state.record.source_seats, self.active)

    def returned(self) -> None:
        """Note that the older layout is the present one again."""
        seats = self._state.record.source_seats
        self._state.update(shards=seats, sources={}, source_seats={})

    def set_aside(self, refusal: NoRoomError) -> bool:
        """Have the next incarnation give the position of a node without room to another spare.

        False at the job's first start, when it is a mistake that the user can mend.
        """
        if not self._state.record.shards:
            return False
        self.take(self.seats.set_aside(refusal.node))
        self._emit("no_room", f"{refusal}; another spare is tried", refusal.node)
        return True

    def free_spares(self) -> list[str]:
        """Nodes that answer and could take the place of another one."""
        return self.seats.free(self._fleet.links)

    def spares_gone(self) -> bool:
        """True if the job had spares and none is left to replace the next node that is lost."""
        had = self._spec.spares or len(self.seats.active) < self._spec.nodes
        return bool(had) and not self.free_spares()

    def owned(self, admitted: Inventories) -> list[m.Inventory]:
        """Inventories reduced to the shards that are each node's own; other claims own nothing."""
        return owned_arenas(admitted, self.places())

    def owned_sources(self, admitted: Inventories) -> list[m.Inventory]:
        """As ``owned``, of the shards of an older layout; they may not be sources yet."""
        record, holders = self._state.record, self.seats.holders(admitted)
        places = {s: node for s, node in record.sources.items() if node in holders}
        older = {
            node: replace(found, arenas=found.sources or (() if record.shards else found.arenas))
            for node, found in admitted.items()
        }
        return owned_arenas(older, places)

    async def until_smp_lost(self) -> SmpLost:
        """Replace SMPs that die by themselves until one cannot be.

        When this is cancelled it first completes a replacement: what is freed or drained at the
        job's end needs the new SMP.
        """
        while True:
            dead = await self.smps.ended()
            work = asyncio.gather(*map(self._replace_smp, dead))
            try:
                reasons = await asyncio.shield(work)
            except asyncio.CancelledError:
                while not work.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({work})
                raise
            for node, reason in zip(dead, reasons, strict=True):
                if reason:
                    return SmpLost(reason, node)

    async def _replace_smp(self, node: str) -> str:
        """Have a new SMP adopt the arenas of a node; why that cannot be, or an empty string."""
        self._fleet.disconnect(node)
        try:
            endpoint = await self.smps.ensure(node)
        except ControlPlaneError as error:
            return "" if self.without([node]) else str(error)
        self._emit("smp_restarted", f"the SMP of {node} died; a new one took its arenas", node)
        self._fleet.connect(node, endpoint)
        if self._pump.cycle is None:
            return f"the SMP of {node} died before training"
        await self._fleet.refresh()
        self._pump.smp_restarted(node)
        return ""

    def without(self, nodes: Sequence[str]) -> bool:
        """Give lost nodes up if training needs none of them; False if one of them trains."""
        if not nodes or any(node in self.active for node in nodes):
            return False
        for node in nodes:
            self._give_up(node)
            text = f"spare {node} is lost; training continues"
            self._fleet.observers.emit(SpareLostEvent(node=node), text)
        return True

    async def while_all_answer(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which asks SMPs; ControlPlaneError once a needed node is lost.

        So when an SMP has ended, when a node that trains is silent, when the coordinator has
        failed.  Of a node that is only cut off, nobody else would say so before the end of timeouts
        that are meant for a rebuild.  StaleIncarnationError when somebody else leads the job.
        """
        return await first_end(self.smps.while_all_run(work), self._silence())

    async def _silence(self) -> NoReturn:
        failure = await self.until_silence()
        raise ControlPlaneError(failure.text, failure.node)

    async def until_silence(self) -> Failure:
        """Wait until a node that trains is silent, or the coordinator has failed.

        StaleIncarnationError when somebody else leads the job.
        """
        fleet = self._fleet
        while True:
            await fleet.alarm.wait()
            if (error := fleet.take_failure()) is not None:
                log.error("the coordinator failed", exc_info=error)
                text = f"the coordinator failed: {error!r}"
                self._emit("coordinator_failed", text, "")
                return Interrupted(text, error=type(error))
            fleet.require_lead()
            lost = self.silent()
            if lost and not self.without(lost):
                text = f"no heartbeat from {', '.join(lost)}"
                self._emit("silent", text, lost[0])
                return NodeLost(text, lost[0], idle=fleet.timing.node_timeout)

    def silent(self) -> list[str]:
        """Nodes without a heartbeat whose SMP is not known to have ended."""
        nodes = self._fleet.silent_nodes(list(self._fleet.links))
        return [node for node in nodes if self.smps.alive(node)]

    async def _reachable(self) -> list[str]:
        """Nodes whose SMP runs, started where it does not; their links are connected."""
        nodes = self._launcher.nodes()
        there = await self._connect_all(nodes)
        self._fleet.forget_silence()
        quiet = await self._quiet(self._heard)
        return [n for n in itertools.compress(nodes, there) if n not in quiet]

    async def answering(self, nodes: Collection[str]) -> list[str]:
        """Those of these nodes whose SMP answers; it is started where none runs."""
        links = self._fleet.links
        with suppress(SchedulerAwayError):
            await self._connect_all([node for node in nodes if node not in links])
        quiet = await self._quiet(set(nodes) - set(self.active))
        return [node for node in nodes if node in links and node not in quiet]

    async def _quiet(self, doubtful: Collection[str]) -> set[str]:
        """Give up those of these nodes that do not answer just now.

        A scheduler may count a lost node, and what ran there, as alive for minutes.
        """
        linked = self._fleet.links.keys() & set(doubtful)
        quiet = linked & set(await self._fleet.quiet_nodes()) if linked else set()
        for node in quiet:
            self._give_up(node)
        return quiet

    async def _connect_all(self, nodes: Sequence[str]) -> list[bool]:
        """True for each connected node; SchedulerAwayError if only the scheduler is at fault."""
        found = await asyncio.gather(*map(self._connect, nodes), return_exceptions=True)
        # Not before all are done: a later try would start the same SMPs a second time.
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one is True for one in found]

    async def _connect(self, node: str) -> bool:
        if node in self.silent():
            self._give_up(node)
            return False
        try:
            endpoint = await self.smps.ensure(node)
        except SchedulerAwayError:
            raise
        except ControlPlaneError as error:
            # At the job's start a node that merely refuses is a mistake that the user can mend.
            if self._fleet.incarnation == 0 and not isinstance(error, NodeUnreachable):
                raise MegatronFTError(str(error)) from error
            self._give_up(node)
            return False
        link = self._fleet.links.get(node)
        if link is None or link.endpoint != endpoint:
            self._fleet.connect(node, endpoint)
        return True

    def _give_up(self, node: str) -> None:
        link = self._fleet.links.get(node)
        if link is not None:
            self._heard[node] = link.last_heard
        self._fleet.disconnect(node)
        self.smps.forget(node)

    def _emit(self, kind: str, text: str, node: str) -> None:
        self._fleet.observers.emit(kind, text, node=node)
