"""Events of a job, and the observers that get them from the supervisor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

log = logging.getLogger(__name__)

KINDS: Mapping[str, str] = {
    "supervising": "a supervisor has begun",
    "transport": "parity travels over TCP instead of MPI",
    "cold_start": "trainers could not be forked and import anew, for a reason that is given",
    "new_process": "a rank that survived starts in a new process, for a reason that is given",
    "waiting": "a node obeys an older supervisor, or none yet, and is waited for",
    "trainers_started": "trainers were started",
    "unregistered": "ranks have not registered for long: they start, or train without snapshots",
    "training": "all ranks are ready and train",
    "caught_up": "training has reached the iteration at which the incarnation before had ended",
    "committed": "a snapshot was committed, in memory or with parity",
    "aborted": "a snapshot was given up before it was committed",
    "dropped": "a snapshot was not taken: its iteration had passed",
    "renewed": "larger arenas are made for a state that has outgrown its own",
    "held": "a reader holds a snapshot, or a slot waits for its memory: new ones are skipped",
    "released": "snapshots are taken again",
    "given_up": "a committed snapshot is given up: its slot is needed, or its bytes are damaged",
    "exposed": "a loss would cost more than the limit, for a reason that is given",
    "protected_again": "a loss would no longer cost more than the limit",
    "paused": "snapshots were paused by command",
    "resumed": "snapshots were resumed by command",
    "interval": "the interval of snapshots was changed",
    "numbering": "the numbers of iterations do not rise by one: permits are for those that come",
    "pressure": "snapshots wait, as they make iterations late",
    "pressure_over": "snapshots are taken at their interval again, after they have waited",
    "drained": "a snapshot is on disk",
    "drain_urged": "a drain begins before it is due",
    "drain_cost": "with two slots a drain keeps snapshots from being taken: what a failure costs",
    "drain_awaited": "training has finished, and its last drain is waited for",
    "drain_failed": "a snapshot could not be written to disk",
    "drain_hangs": "a drain was killed and does not end, as its disk hangs; no other begins",
    "drain_hang_over": "the disk answers again, so drains begin again",
    "retention_failed": "older drains could not be removed",
    "exported": "a snapshot was exported as a checkpoint of the framework",
    "export_failed": "an export failed",
    "reader_stalled": "a reader of memory made no progress and lost its hold",
    "world_ended": "the encoders ended and are started again",
    "world_broken": "the encoders were ended after an error",
    "world_refused": "encoders could not be started ahead",
    "smp_restarted": "a snapshot daemon died and another one took its memory over",
    "trainer_died": "a trainer ended",
    "log": "the last lines of a trainer's log",
    "hang": "training makes no progress",
    "straggler": "a rank is slower than its peers, which wait for it",
    "watch_failed": "hangs may be missed",
    "scheduler_away": "the scheduler did not start a process: it is tried again",
    "silent": "a node does not answer",
    "node_lost": "a node is lost",
    "interrupted": "an incarnation was interrupted by an error of its control plane",
    "coordinator_failed": "an error of the coordinator's own ended an incarnation",
    "incarnation_ended": "an incarnation has ended, by a failure or on request",
    "autopsy": "a failure was analysed: the first rank to stop, and why",
    "backoff": "the next start waits, after repeated failures",
    "damaged": "memory of a node is damaged and counts as lost",
    "corrupt": "bytes differ from their digests and count as lost",
    "suspect": "encoders refuse the bytes of one arena again and again",
    "refused": "a node refused an order",
    "unhealthy": "the health command failed on a node",
    "health_unknown": "the health command has said nothing of a node",
    "avoided": "a node caused two failures in a row",
    "no_room": "a node has too little memory for its part",
    "not_attached": "a rank cannot use its larger arena: no snapshots are taken until it can",
    "spare": "a spare takes the place of a node",
    "spare_lost": "a spare is lost",
    "crowded": "a stripe has more members in a failure domain than it can lose",
    "restoring": "it is decided what is restored, and from where",
    "rebuilt": "lost shards were rebuilt from parity",
    "rebuild_failed": "a rebuild failed",
    "from_disk": "memory cannot serve: training resumes from disk",
    "from_scratch": "neither memory nor disk can serve: training starts from nothing",
    "load_failed": "a drained checkpoint could not be loaded into memory",
    "restore_from_unusable": "--restore-from cannot be used",
    "declined": "the ranks declined the snapshot that memory offered",
    "replicas_differ": "replicas that must be equal are not: the snapshot is given up",
    "replicas_unlike": "replicas differ by design and are compared no more",
    "quarantined": "training failed twice from a snapshot: it is not used again",
    "rewind": "a rewind was asked for",
    "notes_unwritten": "the job's notes could not be written",
    "recovered": "all ranks have ended their first iteration after a failure",
    "shrunk": "the job continues with fewer nodes",
    "grown": "the job continues with more nodes",
    "not_shrunk": "the job cannot continue with fewer nodes",
    "not_grown": "the job does not take back nodes",
    "reshaping": "a snapshot is reshaped for other ranks",
    "reshaped": "a snapshot was reshaped",
    "evacuating": "the ranks of a node are about to move",
    "evacuated": "the ranks of a node have moved",
    "not_evacuated": "a node cannot be evacuated",
    "undone": "an evacuated node is a spare again",
    "decided": "the cheapest way to continue without a spare was chosen, by its expected cost",
    "holding": "memory is held until replacement hosts come",
    "host": "a replacement host has come",
    "hold_refused": "no replacement host can be asked for",
    "hold_timed_out": "no replacement host came in time",
    "salvaging": "memory is drained before the job stops",
    "salvage_failed": "memory could not be drained before the job stops",
    "stopping": "the job is to stop; a last drain runs",
    "not_freed": "memory may be left behind",
    "finished": "training has finished",
    "stopped": "the job has stopped before training had finished",
}
"""Every kind of event, and what has happened when it is emitted."""


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]


class EventFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a kind of event that programs read; other kinds are text for people.

    Names are those on disk.  A field that an older release did not write has a default.
    """

    kind: ClassVar[str]


class TrainingEvent(EventFacts, frozen=True):
    """All ranks train, from this iteration."""

    kind = "training"
    iteration: Count = -1


class EndedEvent(EventFacts, frozen=True):
    """An incarnation ended ``ago`` seconds before, at iteration ``reached``; see ends.py."""

    kind = "incarnation_ended"
    reached: Count = -1
    ago: Seconds = 0.0
    cause: str = ""
    node: str = ""
    asked: bool = False


class CaughtUpEvent(EventFacts, frozen=True):
    """Training reached ``ago`` seconds before where the incarnation before had ended."""

    kind = "caught_up"
    iteration: Count = -1
    ago: Seconds = 0.0


class SnapshotEvent(EventFacts, frozen=True):
    """A snapshot's end; ``stall`` is the longest time that it has held a trainer."""

    iteration: Count = -1
    stall: Seconds = 0.0


class CommittedEvent(SnapshotEvent, frozen=True):
    """It is committed; ``level`` is "local" or "protected"."""

    kind = "committed"
    level: str = ""


class AbortedEvent(SnapshotEvent, frozen=True):
    """It was given up."""

    kind = "aborted"


class DroppedEvent(SnapshotEvent, frozen=True):
    """It was not taken: its iteration had passed."""

    kind = "dropped"


class BackoffEvent(EventFacts, frozen=True):
    """The next start waits for this long."""

    kind = "backoff"
    seconds: Seconds = 0.0


class RestoringEvent(EventFacts, frozen=True):
    """The snapshot to be restored and its source; ``lost`` shards are rebuilt from parity."""

    kind = "restoring"
    iteration: Count = -1
    source: str = ""
    lost: tuple[str, ...] = ()
    iterations_lost: Count | None = None


class RecoveredEvent(EventFacts, frozen=True):
    """The seconds of a recovery in parts; see RecoveryTime."""

    kind = "recovered"
    total: Seconds = 0.0
    detect: Seconds = 0.0
    kill: Seconds = 0.0
    decide: Seconds = 0.0
    rebuild: Seconds = 0.0
    start: Seconds = 0.0
    iterate: Seconds = 0.0
    starts: dict[str, list[int]] = {}


class AutopsyEvent(EventFacts, frozen=True):
    """The rank that stopped first, -1 if no single one is known; ``folder`` has the evidence."""

    kind = "autopsy"
    rank: Count = -1
    node: str = ""
    verdict: str = ""
    how: str = ""
    folder: str = ""


class NodeLostEvent(EventFacts, frozen=True):
    """A node is lost."""

    kind = "node_lost"
    node: str = ""


class SpareLostEvent(EventFacts, frozen=True):
    """A spare is lost."""

    kind = "spare_lost"
    node: str = ""


class RebuiltEvent(EventFacts, frozen=True):
    """Lost shards were rebuilt from parity."""

    kind = "rebuilt"
    bytes_decoded: Count = 0
    seconds: Seconds = 0.0


class ReshapedEvent(EventFacts, frozen=True):
    """A snapshot was reshaped; what was read from storage is unset if that was not measured."""

    kind = "reshaped"
    iteration: Count = -1
    bytes_needed: Count = 0
    bytes_received: Count = 0
    storage_bytes_read: Count | msgspec.UnsetType = msgspec.UNSET
    seconds: Seconds = 0.0


class ReplicasDifferEvent(EventFacts, frozen=True):
    """Replicas that must be equal are not: of these tensors, on these shards and nodes."""

    kind = "replicas_differ"
    iteration: Count = -1
    shards: list[str] = []
    nodes: list[str] = []
    tensors: str = ""


class StoppedEvent(EventFacts, frozen=True):
    """The command ended with this code before training had finished."""

    kind = "stopped"
    code: Count = -1


class DrainedEvent(EventFacts, frozen=True):
    """A snapshot is on disk in this folder."""

    kind = "drained"
    iteration: Count = -1
    folder: str = ""


class ReaderStalledEvent(EventFacts, frozen=True):
    """A reader of memory made no progress and lost its hold."""

    kind = "reader_stalled"
    reader: str = ""
    node: str = ""


def _leaves(kind: type[EventFacts]) -> list[type[EventFacts]]:
    below = [leaf for child in kind.__subclasses__() for leaf in _leaves(child)]
    return below or [kind]


FACTS: Mapping[str, type[EventFacts]] = {one.kind: one for one in _leaves(EventFacts)}
"""The facts of each kind of event that has some."""


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened.  ``kind`` is one of KINDS, ``text`` is for people.

    ``monotonic`` is in seconds.  ``facts`` are for programs, None for a kind that has none;
    ``fields`` is what the line on disk has beside the text.
    """

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    monotonic: float = field(default_factory=time.monotonic)
    facts: EventFacts | None = None


Observer = Callable[[JobEvent], None]


class Observers:
    """Functions that get every event; one that fails stops nobody and gets the next one, too."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def emit(self, what: str | EventFacts, text: str, **fields: Any) -> None:
        """Pass one event on: of a kind with its fields, or of the kind of these facts."""
        if isinstance(what, str):
            event = JobEvent(what, text, fields)
        else:
            event = JobEvent(what.kind, text, msgspec.to_builtins(what), facts=what)
        for observer in list(self._observers):
            try:
                observer(event)
            except Exception as error:
                log.error("%r failed on %r: %r", observer, event.kind, error)
