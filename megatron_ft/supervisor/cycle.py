"""One snapshot from permit to commit, as decisions without input or output.

SnapshotPump feeds events and answers in and performs the actions that come out; the model
test does the same with random interleavings.  There is at most one snapshot under way::

    IDLE --propose--> CAPTURING --all sealed--> ENCODING --all encoded--> COMMITTING --> IDLE
                          |                        |
                          +-- missed, abandoned,   +-- bad bytes: ABORTING
                          |   overdue: ABORTING    +-- world gone: COMMITTING as local
                          +-- no encoder world: COMMITTING as local
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from megatron_ft.core.errors import TransitionRefusedError, WorldGoneError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.exposure import StripeMap
from megatron_ft.supervisor.orders import orders_by_node
from megatron_ft.supervisor.schedule import Schedule


@dataclass(frozen=True)
class Send:
    """Send a request to a node's SMP and report its answer to ``answered``."""

    node: str
    message: m.Message


@dataclass(frozen=True)
class KillWorld:
    """End an encoder world; its encoders' deaths arrive as WriterGone events."""

    world: str
    reason: str


@dataclass(frozen=True)
class SnapshotEnded:
    """A snapshot is over: ``level`` is protected, local or aborted; ``last`` if training is too.

    ``again`` says that it had been committed as local before and was to get parity.  ``corrupt``
    are shards whose bytes encoders found wrong.
    """

    snapshot: SnapshotId
    iteration: int
    level: str
    reason: str = ""
    last: bool = False
    again: bool = False
    corrupt: frozenset[str] = frozenset()


Action = Send | KillWorld | SnapshotEnded


Judge = Callable[[SnapshotId, int, Mapping[str, Sequence[m.ReplicaDigests]]], str]
"""Gives the reason why a sealed snapshot, of an iteration, is not to be committed, or nothing."""


def _accept(snapshot: SnapshotId, iteration: int, replicas: object) -> str:
    return ""


class CyclePhase(Enum):
    """Phase of the snapshot under way."""

    IDLE = "idle"
    CAPTURING = "capturing"
    ENCODING = "encoding"
    COMMITTING = "committing"
    ABORTING = "aborting"


class SnapshotCycle:
    """Permits snapshots one after the other and takes each to commit or abort.

    ``places`` maps each shard to its node, ``schedule`` chooses the iterations.  ``stay`` is how
    long trainers stay at the boundary of the snapshot under way, 0: not at all.  ``judge`` is
    asked once all shards are sealed, with the digests of their replicas.
    """

    def __init__(
        self,
        incarnation: int,
        places: Mapping[str, str],
        stripes: tuple[m.StripeOrder, ...],
        schedule: Schedule,
        judge: Judge = _accept,
    ) -> None:
        self.incarnation = incarnation
        self.places = dict(places)
        self.nodes = sorted(set(places.values()))
        self.stripes = stripes
        self.schedule = schedule
        self._orders = orders_by_node(stripes, places)
        self.phase = CyclePhase.IDLE
        self.snapshot = SnapshotId(incarnation, 0)
        self.iteration = -1
        self.level = ""
        # Shards that are not sealed, then those without parity, then nodes without an answer.
        self._waiting: set[str] = set()
        # Shards whose trainer may still write to its slot, whatever became of the snapshot.
        self._writing: set[str] = set()
        self._encoders: set[str] = set()
        self._world = ""
        self._broken = ""
        self._corrupt: frozenset[str] = frozenset()
        self._last = False
        self._sequence = 0
        self._again = False
        self._passed_since: float | None = None
        self._stuck = False
        self.stay = 0.0
        self._judge = judge
        self._replicas: dict[str, Sequence[m.ReplicaDigests]] = {}

    @cached_property
    def stripe_map(self) -> StripeMap:
        """The stripes by their nodes."""
        return StripeMap(self.places, self.stripes)

    @property
    def ready(self) -> bool:
        """True if nothing is under way and the last capture of every trainer has ended.

        Before that a permit may be asked for, but nodes on which one still writes refuse it.
        """
        return self.phase == CyclePhase.IDLE and not self._writing

    def propose(
        self,
        progress: int,
        world: str,
        *,
        give_up_protected: bool = False,
        ahead: int | None = None,
        stay: float = 0.0,
        lost: SnapshotId | None = None,
    ) -> list[Action]:
        """Permit the next snapshot, if none is under way.

        ``progress`` is the highest iteration that any trainer has finished, -1 if none has
        yet; ``world`` the encoder world that is up on all nodes, "" if none.  The last
        protected snapshot makes room for it only with ``give_up_protected``.  With ``ahead`` it
        is of so many iterations after the soonest possible one, whatever the interval.  Trainers
        stay at its boundary for up to ``stay`` seconds.  ``lost`` is a committed snapshot that
        nothing can be restored from: it makes room first.
        """
        if self.phase != CyclePhase.IDLE or self._last:
            return []
        self.schedule.reached(progress)
        if self.schedule.waits(progress, urgent=ahead is not None):
            return []
        self._sequence += 1
        self.snapshot = SnapshotId(self.incarnation, self._sequence)
        self._again = False
        self.iteration = self.schedule.next_iteration(progress, ahead)
        self.schedule.permitted(self.iteration)
        self.phase = CyclePhase.CAPTURING
        self._world = world
        self._broken, self._corrupt = "", frozenset()
        self._waiting, self._writing = set(self.places), set(self.places)
        self._passed_since, self.stay, self._replicas = None, stay, {}
        given_up = give_up_protected, stay, lost
        grant = m.Grant(self.incarnation, self.snapshot, self.iteration, *given_up)
        return self._to_all(grant)

    def protect(self, snapshot: SnapshotId, iteration: int, world: str) -> list[Action]:
        """Give parity to a snapshot that is committed as local, where it lies.

        Encoders were away when it was taken.  Until they have ended it stays what it was.
        """
        if self.phase != CyclePhase.IDLE or self._last or not self.stripes:
            return []
        self.snapshot, self.iteration, self._world = snapshot, iteration, world
        self._broken, self._corrupt, self._again, self.stay = "", frozenset(), True, 0.0
        return self._encode()

    def renewed(self, stripes: tuple[m.StripeOrder, ...]) -> None:
        """The arenas are others now: of the same members, with other lengths."""
        assert self.ready, "something is under way"
        self.stripes = stripes
        self._orders = orders_by_node(stripes, self.places)

    def world_changed(self, world: str) -> None:
        """Use a world that came up before encoding for the snapshot under way."""
        if self.phase == CyclePhase.CAPTURING:
            self._world = world

    def handle(self, node: str, body: Any) -> list[Action]:
        """React to an event of a node."""
        self._note_end(body)
        if isinstance(body, m.Sealed):
            return self._sealed(body)
        if isinstance(body, m.Encoded):
            return self._encoded(body)
        if isinstance(body, m.Missed | m.Abandoned):
            return self._gave_up(body)
        if isinstance(body, m.OrderFailed):
            return self._order_failed(body)
        if isinstance(body, m.WriterGone):
            return self._writer_gone(node, body)
        return []

    def _note_end(self, body: Any) -> None:
        """Note that a trainer writes to its slot no more, whatever became of the snapshot."""
        if isinstance(body, m.Sealed) and body.record.snapshot == self.snapshot:
            self._writing.discard(body.record.shard_id)
        ended = isinstance(body, m.Missed | m.Abandoned | m.SlotFreed)
        if ended and body.snapshot == self.snapshot:
            self._writing.discard(body.shard_id)

    def answered(self, node: str, request: m.Message, answer: m.Message) -> list[Action]:
        """React to a node's answer to one of our requests."""
        if getattr(request, "snapshot", None) != self.snapshot:
            return []
        if isinstance(answer, m.Refused):
            return self._refused(node, request, answer)
        decided = {m.Commit: CyclePhase.COMMITTING, m.Abort: CyclePhase.ABORTING}
        if self.phase != decided.get(type(request)):
            return []
        self._waiting.discard(node)
        if self.phase == CyclePhase.COMMITTING:
            reach("commit.between" if self._waiting else "commit.last")
        return [] if self._waiting else self._over()

    def smp_restarted(self, node: str) -> list[Action]:
        """React to a new SMP of ``node``, which adopted the old one's arenas.

        Words that may be lost with the old one are repeated; what it was in the
        middle of is given up.  Its encoder has ended with it.
        """
        if self.phase == CyclePhase.CAPTURING:
            return self._abort(f"the SMP of {node} was restarted")
        if self.phase == CyclePhase.ENCODING:
            return self._writer_gone(node, m.WriterGone("encoder", self._world, 0))
        return self._repeat(node)

    def _repeat(self, node: str) -> list[Action]:
        """The word that decides the snapshot once more, to a node that has not confirmed it."""
        if self.phase == CyclePhase.COMMITTING and node in self._waiting:
            return [Send(node, m.Commit(self.incarnation, self.snapshot, self.level))]
        if self.phase == CyclePhase.ABORTING and node in self._waiting:
            return [Send(node, m.Abort(self.incarnation, self.snapshot, self._broken))]
        return []

    def give_up(self, reason: str) -> list[Action]:
        """Abort the snapshot under way unless it is decided already."""
        if self.phase == CyclePhase.CAPTURING:
            return self._abort(reason)
        if self.phase == CyclePhase.ENCODING:
            return self._break(reason)
        return []

    def overdue(self, progress: int, now: float, limit: float) -> list[Action]:
        """Abort a capture that has not ended ``limit`` seconds after its iteration was passed.

        ``progress`` is as for ``propose``.  Once a trainer has finished the iteration after it,
        every rank has been at this boundary.
        """
        if self.phase != CyclePhase.CAPTURING or progress <= self.iteration:
            self._passed_since = None
            return []
        if self._passed_since is None:
            self._passed_since = now
        if now - self._passed_since <= limit:
            return []
        self._stuck = True
        owing = sorted(self._waiting)
        more = f" and {len(owing) - 3} others" if len(owing) > 3 else ""
        text = f"no end of the capture of {', '.join(owing[:3])}{more}"
        return self._abort(f"{text} {limit:.0f} s after its iteration")

    def _sealed(self, body: m.Sealed) -> list[Action]:
        if self.phase != CyclePhase.CAPTURING or body.record.snapshot != self.snapshot:
            return []
        self._waiting.discard(body.record.shard_id)
        self._replicas[body.record.shard_id] = body.replicas
        if not self._all_sealed():
            return []
        if reason := self._judge(self.snapshot, self.iteration, self._replicas):
            return self._abort(reason)
        if not self._world or not self.stripes:
            return self._commit("local")
        return self._encode()

    def _all_sealed(self) -> bool:
        return not self._waiting

    def _encode(self) -> list[Action]:
        self.phase = CyclePhase.ENCODING
        self._waiting = set(self.places)
        self._encoders = set(self.nodes)
        return [Send(node, self._encode_on(node)) for node in self.nodes]

    def _encode_on(self, node: str) -> m.Encode:
        part = self._orders.get(node, ())
        return m.Encode(self.incarnation, self.snapshot, self._world, part)

    def _encoded(self, body: m.Encoded) -> list[Action]:
        if self.phase != CyclePhase.ENCODING or body.snapshot != self.snapshot or self._broken:
            return []
        self._waiting.discard(body.shard_id)
        return [] if self._waiting else self._commit("protected")

    def _gave_up(self, body: m.Missed | m.Abandoned) -> list[Action]:
        if body.snapshot != self.snapshot or self.phase != CyclePhase.CAPTURING:
            return []
        if isinstance(body, m.Missed):
            self.schedule.missed()
            text = f"{body.shard_id} had passed iteration {self.iteration}, or gone back before it"
            return self._abort(text)
        return self._abort(f"{body.shard_id}: {body.reason}")

    def _order_failed(self, body: m.OrderFailed) -> list[Action]:
        if self.phase != CyclePhase.ENCODING or body.snapshot != self.snapshot:
            return []
        self._corrupt |= {body.corrupt} if body.corrupt else set()
        return self._break(body.reason)

    def _writer_gone(self, node: str, body: m.WriterGone) -> list[Action]:
        if body.role == "trainer":
            # Training is over, well or not: what is sealed may finish, nothing new is begun.
            self._last = True
            return self._abort(f"trainer {body.who} has ended") if self._capturing() else []
        if body.who != self._world:
            return []
        if self._capturing():
            self._world = ""
        if self.phase != CyclePhase.ENCODING:
            # Suspended, it had outlived its SMP: the new one refused to commit over it.
            return self._repeat(node)
        return self._encoder_ended(node, f"the encoder on {node} died")

    def _encoder_ended(self, node: str, reason: str) -> list[Action]:
        self._encoders.discard(node)
        actions = self._break(reason)
        return actions + ([] if self._encoders else self._encoding_ended())

    def _capturing(self) -> bool:
        return self.phase == CyclePhase.CAPTURING

    def _break(self, reason: str) -> list[Action]:
        """End the whole world, as encoding cannot finish; then settle without parity."""
        if self._broken:
            return []
        self._broken = reason or "unknown reason"
        return [KillWorld(self._world, self._broken)]

    def _encoding_ended(self) -> list[Action]:
        """Settle once no encoder can write: commit as local if the data are good, else abort."""
        if self._corrupt and not self._again:
            return self._abort(self._broken)
        return self._commit("local")

    def _refused(self, node: str, request: m.Message, answer: m.Refused) -> list[Action]:
        if isinstance(request, m.Grant) and self.phase == CyclePhase.CAPTURING:
            # Another refusal than of a slot lasts longer than the next message of a trainer.
            if self._stuck or not isinstance(answer.error, TransitionRefusedError):
                self.schedule.refused()
            return self._abort(answer.reason)
        if isinstance(request, m.Encode) and self.phase == CyclePhase.ENCODING:
            if isinstance(answer.error, WorldGoneError):
                return self._encoder_ended(node, answer.reason)
            return self._break(answer.reason)
        return []

    def _commit(self, level: str) -> list[Action]:
        reach("commit.first")
        self.phase, self.level, self._stuck = CyclePhase.COMMITTING, level, False
        self._waiting = set(self.nodes)
        return self._to_all(m.Commit(self.incarnation, self.snapshot, level))

    def _abort(self, reason: str) -> list[Action]:
        self.phase, self.level, self._broken = CyclePhase.ABORTING, "aborted", reason
        self._waiting = set(self.nodes)
        return self._to_all(m.Abort(self.incarnation, self.snapshot, reason))

    def _over(self) -> list[Action]:
        self.phase = CyclePhase.IDLE
        if self.level != "aborted" and not self._again:
            self.schedule.committed()
        how = (self.level, self._broken, self._last, self._again, self._corrupt)
        return [SnapshotEnded(self.snapshot, self.iteration, *how)]

    def _to_all(self, message: m.Message) -> list[Action]:
        return [Send(node, message) for node in self.nodes]
