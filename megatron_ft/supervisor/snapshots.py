"""The snapshots of a job: permits, commits and aborts, as cycle.py decides them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import protected_gives_way
from megatron_ft.supervisor.cycle import (
    Action,
    CyclePhase,
    KillWorld,
    Send,
    SnapshotCycle,
    SnapshotEnded,
)
from megatron_ft.supervisor.events import (
    AbortedEvent,
    CommittedEvent,
    DroppedEvent,
    ReaderStalledEvent,
)
from megatron_ft.supervisor.expected_encoders import ExpectedEncoders
from megatron_ft.supervisor.exposure import Fallbacks
from megatron_ft.supervisor.fleet import HOLDER, REQUEST_TIMEOUT_SECONDS, Fleet
from megatron_ft.supervisor.replicas import ReplicaWatch
from megatron_ft.supervisor.schedule import Skips
from megatron_ft.supervisor.standing import Standing

LOOK_SECONDS = 0.25
"""Interval of looks at what no event brings: the end of a pause, parity that takes too long."""
MOST_PROTECT_TRIES = 3
"""Most tries of parity for a local snapshot; then only a newer snapshot gets some."""


class Standstill(NamedTuple):
    """A snapshot at whose boundary trainers stay for up to ``seconds``."""

    ahead: int
    seconds: float
    ended: asyncio.Future[SnapshotEnded]


class SnapshotPump:
    """Takes one snapshot after the other while an incarnation trains.

    ``cycle`` is that of the incarnation, None before and after.  ``skips`` counts snapshots that
    were due and could not be permitted, ``given_up`` those aborted since the last commit, with the
    reason of the last one.  ``renewing`` while arenas give way to larger ones.
    """

    def __init__(self, fleet: Fleet, standing: Standing, encoders: ExpectedEncoders) -> None:
        self.fleet, self.standing, self.encoders = fleet, standing, encoders
        self.cycle: SnapshotCycle | None = None
        self.skips, self._emit = Skips(), fleet.observers.emit
        self.replicas = ReplicaWatch(fleet.observers)
        self.given_up = (0, "")
        self.renewing = False
        # By snapshot: the longest time that it has held a trainer.
        self._stalls: dict[SnapshotId, float] = {}
        self._kick = asyncio.Event()
        self._standstill: Standstill | None = None
        self._encoding_since = self._world_seen = self._first_try = 0.0
        self._protect_tries: dict[SnapshotId, int] = {}
        self._lost_reported: SnapshotId | None = None
        fleet.listen(self._on_event)
        fleet.listen_answers(self._on_answer)

    @property
    def paused(self) -> bool:
        """True if a node was ordered to stop snapshots; one is enough for the whole job."""
        return self.fleet.say(lambda said: said.paused)

    @property
    def pinned(self) -> bool:
        """True if some node has no slot for a snapshot but those that readers hold."""
        return self.fleet.say(lambda said: said.pinned)

    @property
    def crowded(self) -> bool:
        """True if some node has no slot for a snapshot but that of the last protected one."""
        return self.fleet.say(lambda said: said.crowded)

    @property
    def unmade(self) -> bool:
        """True if some node has no slot for a snapshot until further memory is made."""
        return self.fleet.say(lambda said: said.unmade)

    def start(self, cycle: SnapshotCycle) -> None:
        """Permit one snapshot after the other until ``stop``."""
        self.cycle = cycle
        self.given_up = (0, "")
        self._protect_tries.clear()
        self.fleet.keep(self._pump(cycle))

    def fallbacks(self) -> Fallbacks:
        """The snapshots that failures would fall back to."""
        return self.standing.fallbacks(None if self.cycle is None else self.cycle.stripe_map)

    def stop(self) -> None:
        """Permit no more; what is under way is left to the next recovery."""
        self.cycle = self._standstill = None
        self.fleet.forget_failure()
        self.renewing = False
        self._stalls.clear()
        self._kick.set()

    def hold_for_renewal(self, *, holding: bool) -> None:
        """Permit nothing while arenas give way to larger ones."""
        self.renewing = holding

    async def capture_and_stop(self, ahead: int, seconds: float) -> SnapshotEnded:
        """Take a snapshot at whose boundary trainers stay for up to ``seconds``; what became of it.

        It is of the iteration ``ahead`` of the soonest possible one; a permit for a later one is
        taken back.  No other is permitted until ``permit_again``, which lets trainers go, too.
        """
        self._standstill = Standstill(ahead, seconds, asyncio.get_running_loop().create_future())
        self._kick.set()
        return await self._standstill.ended

    def permit_again(self) -> None:
        """End ``capture_and_stop``: snapshots are taken at their interval again."""
        self._standstill = None
        if self.cycle is not None and self.cycle.stay:
            self._perform(self.cycle, self.cycle.give_up("the evacuation was given up"))
        self._kick.set()

    def smp_restarted(self, node: str) -> None:
        """Note that a new, connected SMP has adopted the arenas of ``node``."""
        if self.cycle is not None:
            self._perform(self.cycle, self.cycle.smp_restarted(node))

    async def _pump(self, cycle: SnapshotCycle) -> None:
        self._world_seen = time.monotonic()
        while self.cycle is cycle:
            if self.encoders.usable:
                self._world_seen = time.monotonic()
            self._learn_numbering(cycle)
            if cycle.phase == CyclePhase.IDLE and not self.paused:
                await self.fleet.refresh()
                # A pause may have come with these heartbeats.
                if self.cycle is cycle and cycle.phase == CyclePhase.IDLE and not self.paused:
                    self._perform(cycle, self._next(cycle))
            elif cycle.phase == CyclePhase.ENCODING and self._encoding_too_long(cycle):
                reason = f"no parity after {self._limit(cycle):.0f} s"
                self._perform(cycle, cycle.give_up(reason))
            elif cycle.phase == CyclePhase.CAPTURING:
                fastest = self.fastest(cycle)
                halts = self._standstill is not None and not self._unprotectable(cycle)
                if halts and not cycle.stay and fastest < cycle.iteration:
                    self._perform(cycle, cycle.give_up("a node is evacuated first"))
                now, limit = time.monotonic(), self.fleet.timing.encode_timeout
                self._perform(cycle, cycle.overdue(fastest, now, limit))
            self._kick.clear()
            try:
                await asyncio.wait_for(self._kick.wait(), LOOK_SECONDS)
            except asyncio.TimeoutError:
                continue

    def _learn_numbering(self, cycle: SnapshotCycle) -> None:
        """Let the schedule know how trainers number: a permit is for a number that they pass."""
        heard = [one.report for one in self.fleet.heartbeats.all() if one.report.done]
        if heard:
            last = max(heard, key=lambda report: report.done)
            if text := cycle.schedule.heard(last.done, last.iteration):
                self._emit("numbering", text, stride=cycle.schedule.numbering.stride)

    def _next(self, cycle: SnapshotCycle) -> list[Action]:
        """Begin what is due: parity of the newest local snapshot, or a new one if it has room."""
        halt = self._standstill
        over = self.replicas.differ.is_set()  # this incarnation is about to end
        if over or self.renewing or (halt is not None and halt.ended.done()):
            return []
        if self._unprotectable(cycle) or self.crowded or self.unmade:
            halt = None  # until there is room for it and its parity, snapshots are taken as ever
        actions = self._protect(cycle) if halt is None else []
        return actions or self._permit(cycle, halt)

    def _protect(self, cycle: SnapshotCycle) -> list[Action]:
        """Give parity to the newest snapshot if it is a local one, unless that fails each time."""
        newest, world = self.standing.committed, self.encoders.usable
        if newest is None or newest.level != "local" or not world:
            return []
        tries = self._protect_tries.get(newest.snapshot, 0)
        if tries >= MOST_PROTECT_TRIES or self.standing.newest_is_damaged():
            return []
        actions = cycle.protect(*newest[:2], world)
        if actions:
            self._first_try = self._first_try if tries else time.monotonic()
            self._protect_tries = {newest.snapshot: tries + 1}
        return actions

    def _permit(self, cycle: SnapshotCycle, halt: Standstill | None) -> list[Action]:
        """Permit the next snapshot if it has room, or can be given some; else count it."""
        interval, fastest = cycle.schedule.spacing, self.fastest(cycle)
        world = self.encoders.usable
        lost = self.standing.beyond_repair(cycle.nodes, cycle.stripe_map)
        give_up = lost is None and self.crowded and not self.pinned and self._gives_way(cycle)
        if self.pinned or self.unmade or (self.crowded and not give_up and lost is None):
            self._skip(max(fastest, cycle.schedule.first), interval)
            return []
        skipped = self.skips.end(fastest, interval)
        if skipped is not None:
            text = f"captures continue, {skipped} were skipped"
            self._emit("released", text, skipped=skipped)
        if halt is not None:
            stay = halt.seconds
            return cycle.propose(fastest, world, ahead=halt.ahead, stay=stay, lost=lost)
        actions = cycle.propose(fastest, world, give_up_protected=give_up, lost=lost)
        if give_up and actions:
            text = "it makes room for the next capture: encoders have been away for too long"
            self._emit("given_up", f"the last protected snapshot is given up: {text}")
        if lost is not None and actions and lost != self._lost_reported:
            self._lost_reported = lost
            text = "its bytes are damaged, and parity does not make up for it"
            self._emit("given_up", f"the newest snapshot is given up: {text}")
        return actions

    def _unprotectable(self, cycle: SnapshotCycle) -> bool:
        return bool(cycle.stripes) and not self.encoders.usable

    def fastest(self, cycle: SnapshotCycle) -> int:
        """The highest iteration that a trainer has finished, -1 before."""
        return max((self.fleet.progress.get(s, -1) for s in cycle.places), default=-1)

    def _skip(self, progress: int, interval: int) -> None:
        """Count; the observers get one event for each time that something is in the way."""
        if self.skips.begin(progress, interval):
            full = "the last protected snapshot and a newer local one fill the slots"
            then = "captures are skipped"
            if self.pinned:
                crash = self.fallbacks().crash
                newest = "nothing" if crash is None else f"iteration {crash.iteration}"
                then += (
                    f" until it ends, and a failure falls back to {newest}; with --slots 3 they "
                )
                then += "continue"
            reason = f"{self._reader()} reads a snapshot" if self.pinned else full
            reason = "memory of a further slot is being made" if self.unmade else reason
            self._emit("held", f"{reason}: {then}")

    def _reader(self) -> str:
        """The reader that is in the way of captures, in words."""
        answers = self.fleet.answers
        names = {(n, r) for n in self.fleet.links if n in answers for r in answers[n].readers}
        if any(name == HOLDER for _, name in names):
            return "the job's own drain"
        # Others are named by their process (local_query.py).
        found = sorted(f"process {name.partition('-')[0]} on {node}" for node, name in names)
        return " and ".join(found[:2]) or "a process"

    def _gives_way(self, cycle: SnapshotCycle) -> bool:
        known = self.standing.held
        if set(cycle.nodes) - known.keys():
            return False  # what a node holds is not known yet
        held = [one for node in cycle.nodes for one in known[node]]
        protected = max((one.snapshot for one in held if one.protected), default=None)
        crash, durable = self.fallbacks().crash, self.standing.durable
        if protected is not None and (crash is None or crash.snapshot <= protected):
            return False  # the newer one is damaged: nothing whole would be left
        # Encoders that are up and fail each time are as good as away.
        failing = MOST_PROTECT_TRIES in self._protect_tries.values()
        return protected_gives_way(
            skipped=self.skips.now,
            seconds_away=time.monotonic() - (self._first_try if failing else self._world_seen),
            on_disk=protected is None or (durable is not None and durable.snapshot >= protected),
            protectable=bool(cycle.stripes),
        )

    def _encoding_too_long(self, cycle: SnapshotCycle) -> bool:
        return time.monotonic() - self._encoding_since > self._limit(cycle)

    def _limit(self, cycle: SnapshotCycle) -> float:
        return cycle.stay or self.fleet.timing.encode_timeout

    def _perform(self, cycle: SnapshotCycle, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, m.Encode):
                    self._encoding_since = time.monotonic()
                self.fleet.keep(self._send(cycle, action))
            elif isinstance(action, KillWorld):
                self.encoders.end(action.world, action.reason)
            elif isinstance(action, SnapshotEnded):
                self._ended(action)
        if cycle.ready:
            self._kick.set()

    async def _send(self, cycle: SnapshotCycle, action: Send) -> None:
        """Send until answered: without a Commit's or Abort's answer nothing would ever continue."""
        while self.cycle is cycle and action.node in self.fleet.links:
            try:
                answer = await self.fleet.links[action.node].ask(
                    action.message, REQUEST_TIMEOUT_SECONDS
                )
            except ControlPlaneError as error:
                if not isinstance(action.message, m.Commit | m.Abort):
                    self._perform(cycle, cycle.give_up(str(error)))
                    return
                continue
            if isinstance(answer, m.Refused) and isinstance(action.message, m.Commit | m.Abort):
                self._emit("refused", f"{action.node}: {answer.reason}")
            if self.cycle is cycle:
                self._perform(cycle, cycle.answered(action.node, action.message, answer))
            return

    def _ended(self, ended: SnapshotEnded) -> None:
        if self._standstill is not None and self.cycle is not None and self.cycle.stay:
            if not self._standstill.ended.done():
                self._standstill.ended.set_result(ended)
        if ended.corrupt and self.cycle is not None:
            self.standing.damage.count_refused(ended.corrupt, self.cycle.places)
        if ended.again and ended.level == "local":
            # It is what it was, or known to be less; the event of the broken world has the reason.
            self.standing.damage.count_lost(ended.snapshot, ended.corrupt)
            return
        text = f"snapshot of iteration {ended.iteration}"
        stall = round(self._stalls.pop(ended.snapshot, 0.0), 6)
        if ended.level != "aborted":
            self.standing.commits(ended.snapshot, ended.iteration, ended.level)
            self.given_up = (0, "")
            text += f" committed ({ended.level})"
            self._emit(
                CommittedEvent(iteration=ended.iteration, stall=stall, level=ended.level), text
            )
        elif ended.last:
            event = DroppedEvent(iteration=ended.iteration, stall=stall)
            self._emit(event, f"{text} given up: {ended.reason}")
        else:
            self.given_up = (self.given_up[0] + 1, ended.reason)
            given_up = AbortedEvent(iteration=ended.iteration, stall=stall)
            self._emit(given_up, f"{text} given up: {ended.reason}")

    def _on_event(self, event: m.NodeEvent) -> None:
        body = event.body
        if isinstance(body, m.CaptureCost):
            held = self._stalls.get(body.snapshot, 0.0)
            self._stalls[body.snapshot] = max(held, body.stall_seconds)
        if self.encoders.on_event(event) and self.cycle is not None:
            self.cycle.world_changed(self.encoders.name)
        if isinstance(body, m.ReaderStalled):
            text = f"{body.reader} on {event.node} has not run for {body.seconds:.0f} s"
            text += ": it holds no snapshot any more"
            self._emit(ReaderStalledEvent(reader=body.reader, node=event.node), text)
        if self.cycle is not None:
            self.standing.damage.on_event(event)
            self._perform(self.cycle, self.cycle.handle(event.node, body))

    def _on_answer(self, answer: m.LeaseAnswer, before: m.LeaseAnswer | None) -> None:
        self.standing.holds(answer.node, answer.held)
        if answer.shortage and not (before and before.shortage):
            text = f"{answer.node}: {answer.shortage}; no snapshot is taken before there is room"
            self._emit("no_room", text, node=answer.node)
        others = self.fleet.say(lambda said: said.paused and said.node != answer.node)
        if not others and answer.paused != (before is not None and before.paused):
            word = "paused" if answer.paused else "resumed"
            self._emit(word, f"snapshots {word} by request")
