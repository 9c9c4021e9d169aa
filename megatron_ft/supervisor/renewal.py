"""Larger arenas for shards that have outgrown theirs, made while trainers train.

The present arenas become sources that keep the newest snapshots, larger ones are made beside them,
and each rank goes into its own at a boundary.  Then snapshots are permitted again.  The sources go
when one of these is as safe.  Until then a recovery takes the sources, whatever was under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import msgspec

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import ArenaMemoryError, NoRoomError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.stripes import padded_bytes
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.ends import ArenaRemoved
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.orders import (
    bytes_by_node,
    create_requests,
    shards_by_node,
    stripe_orders,
)
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.restore import RestorePlan, make_arenas
from megatron_ft.supervisor.smp_link import ARENA_TIMEOUT_SECONDS
from megatron_ft.supervisor.standing import Committed

LOOK_SECONDS = 0.05
"""Interval of looks whether the snapshot under way has ended."""

TELL_SECONDS = 5.0
"""Time after which a rank that has not gone into its new arena hears of it again."""

MOST_INTERVALS = 10
"""A restart for the sake of a new arena repeats at most the iterations of this many intervals."""


@dataclass
class ArenaRenewal:
    """Serves the ranks of one incarnation that have outgrown their arenas.

    Larger ones get the first of ``slot_counts`` that fits.
    """

    job: JobContext
    plan: RestorePlan
    registration: Registration
    drains: Drains
    stripes: tuple[StripeState, ...] = field(init=False, default=())
    slot_counts: tuple[int, ...] = field(init=False, default=())
    _wanted: dict[str, int] = field(init=False, default_factory=dict)
    _asked: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _away: set[str] = field(init=False, default_factory=set)
    _arrived: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _renewed_at: Committed | None = field(init=False, default=None)
    _told: str = field(init=False, default="")
    _unattached: dict[str, str] = field(init=False, default_factory=dict)

    def begin(self, stripes: tuple[StripeState, ...], slot_counts: tuple[int, ...]) -> None:
        """Snapshots are about to be permitted, into arenas of these stripes."""
        self.stripes, self.slot_counts = stripes, slot_counts

    def on_event(self, event: m.NodeEvent) -> None:
        body = event.body
        if isinstance(body, m.Outgrown):
            known = self._wanted.get(body.shard_id, 0)
            self._wanted[body.shard_id] = max(known, body.required_bytes)
            self._asked.set()
        elif isinstance(body, m.Attached):
            self._away.discard(body.shard_id)
            if not self._away:
                self._arrived.set()
        elif isinstance(body, m.Unattached):
            self._warn_of(body)

    async def serve(self) -> NoReturn:
        """Make what is asked for, until cancelled.

        An error ends this incarnation: the next one takes the arenas that were there before.
        """
        while True:
            await self._asked.wait()
            self._asked.clear()
            cycle, larger = self.job.pump.cycle, enlarged(self.stripes, self._wanted)
            if cycle is None or larger == self.stripes:
                continue
            self.job.pump.hold_for_renewal(holding=True)
            while not cycle.ready:
                await asyncio.sleep(LOOK_SECONDS)
            if self._may_begin():
                await self._renew(cycle, larger)
            self.job.pump.hold_for_renewal(holding=False)

    def _warn_of(self, unattached: m.Unattached) -> None:
        """Say once for each reason why no snapshots are taken."""
        shard, reason = unattached.shard_id, unattached.reason
        if self._unattached.get(shard) == reason:
            return
        self._unattached[shard] = reason
        self.job.fleet.observers.emit(
            "not_attached",
            f"{shard} cannot use its larger arena ({reason}): no rank's snapshots are taken until "
            f"it can. Training continues, and the newest snapshot stays. It is tried again every "
            f"{TELL_SECONDS:g} s: give the rank what it lacks; after a restart of its process it "
            "resumes from that snapshot",
            shard=shard,
        )

    def _may_begin(self) -> bool:
        """True unless a snapshot that sources alone could replace is not as safe as theirs yet.

        A rank asks again with each snapshot that is given up for lack of room.
        """
        since = self.job.standing.committed != self._renewed_at
        return not (self.job.state.record.sources and since)

    async def _renew(self, cycle: SnapshotCycle, stripes: tuple[StripeState, ...]) -> None:
        """Replace all arenas, or leave them as they are if there is no memory for others."""
        plan, places, fleet = self.plan, cycle.places, self.job.fleet
        keep = self._keep()
        try:
            asked = await self._fitting(stripes, places, keep)
        except ArenaMemoryError as error:
            return self._refuse(str(error))
        self.job.members.make_sources()
        reach("renewal.noted")
        await self._ask({node: m.SetAside(plan.incarnation, keep) for node in cycle.nodes})
        reach("renewal.aside")
        try:
            await make_arenas(fleet, asked, places)
        except NoRoomError as error:
            await self._return(cycle)
            return self._refuse(str(error))
        reach("renewal.made")
        self._note(stripes, cycle)
        await self._move(cycle)
        text = f"{', '.join(sorted(self._wanted))} had outgrown their arenas: larger ones are made"
        fleet.observers.emit("renewed", f"{text}, and snapshots continue")
        self._told = ""

    def _keep(self) -> tuple[SnapshotId, ...]:
        """The snapshots that a crash of trainers, and the loss of a node, would fall back to."""
        known = (self.job.standing.committed, self.job.standing.protected)
        return tuple({one[0] for one in known if one is not None})

    async def _ask(self, requests: Mapping[str, m.Message]) -> None:
        """As ``Connections.ask_all``, for what may take long."""
        links = self.job.fleet.links
        await asyncio.gather(
            *(links[node].demand(one, ARENA_TIMEOUT_SECONDS) for node, one in requests.items())
        )

    async def _fitting(
        self,
        stripes: Sequence[StripeState],
        places: Mapping[str, str],
        keep: tuple[SnapshotId, ...],
    ) -> dict[str, m.CreateArena]:
        """Requests of arenas that all nodes have room for, of the first of ``slot_counts``
        possible.

        ArenaMemoryError, with nothing changed, if there is none.
        """
        *more, fewest = self.slot_counts
        for count in more:
            with suppress(ArenaMemoryError):
                return await self._checked(stripes, places, keep, count)
        return await self._checked(stripes, places, keep, fewest)

    async def _checked(
        self,
        stripes: Sequence[StripeState],
        places: Mapping[str, str],
        keep: tuple[SnapshotId, ...],
        slots: int,
    ) -> dict[str, m.CreateArena]:
        incarnation = self.plan.incarnation
        asked = create_requests(stripes, incarnation, self.plan.lineage, slots)
        room = bytes_by_node(asked, places)
        await self._ask({n: m.CheckRoom(incarnation, keep, size) for n, size in room.items()})
        return asked

    def _refuse(self, reason: str) -> None:
        """Say once why nothing newer is protected; it is tried again as ranks ask again."""
        if reason != self._told:
            text = "a state has outgrown its arena, and larger ones do not fit: its newest snapshot"
            text += f" stays, and none is taken; training continues. {reason}"
            self.job.fleet.observers.emit("no_room", text)
        self._told = reason

    def _note(self, stripes: tuple[StripeState, ...], cycle: SnapshotCycle) -> None:
        """Have everything that is planned from here on be of the new arenas."""
        self.stripes, self._renewed_at = stripes, self.job.standing.committed
        layouts = self.registration.layouts
        for shard, size in self._wanted.items():
            layouts[shard] = msgspec.structs.replace(layouts[shard], required_bytes=size)
        placements, state = self.registration.placements(), self.job.state
        state.update(shards=placements)
        cycle.renewed(stripe_orders(stripes, cycle.places, self.plan.active))
        self.drains.reseat(placements)

    async def _return(self, cycle: SnapshotCycle) -> None:
        """Make the sources arenas again."""
        plan, committed = self.plan, self.job.standing.committed
        newest = None if committed is None else committed.snapshot
        kept = shards_by_node(cycle.places, cycle.places)
        await self._ask(
            {
                node: m.Adopt(plan.incarnation, plan.lineage, newest, tuple(shards), "return")
                for node, shards in kept.items()
            }
        )
        self.job.members.returned()
        await self._move(cycle)

    async def _move(self, cycle: SnapshotCycle) -> None:
        """Wait until every rank has gone into its arena, which none waits for."""
        self._away = set(cycle.places)
        self._arrived.clear()
        while self._away:
            nodes = {cycle.places[shard] for shard in self._away}
            await self._ask({node: m.TellRenewed(self.plan.incarnation) for node in nodes})
            reach("renewal.told")
            try:
                await asyncio.wait_for(self._arrived.wait(), TELL_SECONDS)
            except asyncio.TimeoutError:
                continue


def enlarged(stripes: Sequence[StripeState], wanted: Mapping[str, int]) -> tuple[StripeState, ...]:
    """The stripes with room for these bytes of their shards; none becomes smaller.  Pure."""
    return tuple(
        replace(
            stripe,
            data_bytes=max(
                stripe.data_bytes,
                padded_bytes(
                    [wanted.get(shard, 0) for shard in stripe.members],
                    stripe.data_members,
                    stripe.block_bytes,
                ),
            ),
        )
        for stripe in stripes
    )


async def until_arena_missing(job: JobContext, nodes: Sequence[str]) -> ArenaRemoved:
    """The failure of an arena whose file is gone, where memory serves without it.

    Trainers continue to write into what nobody else can open, and only their next start makes a
    new arena.  Where memory does not serve, or only with an old snapshot (they were paused),
    trainers hold the better state.  The decision waits for a while, as what removes files on
    one node may be about to remove them on others.
    """
    fleet, pump, missing = job.fleet, job.pump, dict[str, str]()
    gone = asyncio.Event()

    def note(answer: m.LeaseAnswer, before: object) -> None:
        if answer.missing and not missing.get(answer.node):
            gone.set()
        missing[answer.node] = answer.missing

    with fleet.listening_answers(note):
        while True:
            await gone.wait()
            reached = max(fleet.progress.values(), default=-1)
            # Whatever removes arenas on one node is likely to have done so on all by then.
            await asyncio.sleep(fleet.timing.node_timeout)
            await fleet.refresh()
            gone.clear()
            serves, cycle = pump.fallbacks().crash, pump.cycle
            most = 0 if cycle is None else MOST_INTERVALS * cycle.schedule.spacing
            found = "nothing" if serves is None else f"only iteration {serves.iteration}"
            for node in nodes:
                if not (text := missing.get(node)):
                    continue
                if serves is not None and reached - serves.iteration <= most:
                    return ArenaRemoved(f"{node}: {text}", node)
                then = f"memory serves {found} without it, and no snapshot is taken before "
                then += "trainers start again: training continues"
                job.emit("damaged", f"{node}: {text}; {then}", node=node)
