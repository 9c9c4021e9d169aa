"""Processes that map arenas: trainers and loaders; encoders are in encoder.py.

Each step is one that a signal, a crash or another process can come between.  A process
that is suspended takes no step; whoever resumes it lets it continue where it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from tests.protocol.model.memory import DAMAGED, MemoryArena, MemorySlot, Tag, record_of


@dataclass
class Process:
    """One operating system process; ``outbox`` is its end of the Unix socket.

    A ``doomed`` one will die by itself, ``joined`` ones are known to their SMP.
    """

    pid: int
    node: str
    alive: bool = True
    suspended: bool = False
    doomed: bool = False
    joined: bool = False
    outbox: list[Any] = field(default_factory=list)

    def key(self) -> tuple[str, str]:
        raise NotImplementedError

    def writing(self) -> bool:
        """Whether it is in the middle of something that touches a slot."""
        raise NotImplementedError


@dataclass
class Trainer(Process):
    """trainer/manager.py and its copy thread, reduced to what touches shared memory.

    A ``released`` one is no writer any more and waits to train again (trainer/resilient.py).
    """

    shard: str = ""
    incarnation: int = 0
    iteration: int = 0
    arena: MemoryArena | None = None
    last_permit: SnapshotId | None = None
    run: Permit | None = None
    copied: int = 0
    given: bool = False
    released: bool = False

    def key(self) -> tuple[str, str]:
        return "trainer", self.shard

    def let_go(self) -> bool:
        """Asked to end its training; whether it answers.

        The copy thread of one that is suspended while it writes does not end, and keeps the arena.
        """
        if not self.suspended:
            self.run, self.arena = None, None
        return not self.suspended or self.writing()

    def reenter(self, incarnation: int) -> None:
        """Train again, in the same process."""
        self.incarnation, self.iteration, self.last_permit = incarnation, 0, None
        self.released = False

    def writing(self) -> bool:
        return self.run is not None

    def boundary(self) -> None:
        """One more iteration has ended: capture, miss or skip."""
        assert self.arena is not None
        self.iteration += 1
        permit = self.arena.permit
        if permit is None or permit.snapshot == self.last_permit:
            return
        busy = self.run is not None and permit.iteration == self.iteration
        if permit.revoked or permit.iteration < self.iteration or busy:
            self.last_permit = permit.snapshot
            self.outbox.append(m.Missed(self.shard, permit.snapshot))
        elif permit.iteration == self.iteration:
            self.last_permit = permit.snapshot
            self.run, self.copied, self.given = permit, 0, False
            place = permit.iteration, permit.slot
            self.outbox.append(m.Begins(self.shard, permit.snapshot, *place))

    def may_copy(self) -> bool:
        """Whether the slot is this capture's: its header has said so."""
        assert self.run is not None and self.arena is not None
        header = self.arena.slots[self.run.slot].header
        given = (SlotState.CAPTURING, self.run.snapshot)
        return self.given or (header.state, header.snapshot) == given

    def waits(self) -> bool:
        """Whether its word that it begins is still under way."""
        return any(isinstance(message, m.Begins) for message in self.outbox)

    def copy(self) -> None:
        """One step of the running capture: a part of the bytes, or the seal."""
        assert self.run is not None and self.arena is not None
        self.given = True
        slot = self.arena.slots[self.run.slot]
        if self.copied < len(slot.data):
            slot.write_data(self.copied, (self.run.snapshot, self.shard))
            self.copied += 1
        elif self.revoked():
            self.abandon("its permit was revoked")
        else:
            record = record_of(self.run.snapshot, self.shard, self.run.iteration)
            self.outbox.append(m.Sealed(record))
            self.run = None

    def revoked(self) -> bool:
        assert self.run is not None and self.arena is not None
        permit = self.arena.permit
        return permit is None or permit.snapshot != self.run.snapshot or permit.revoked

    def abandon(self, reason: str) -> None:
        assert self.run is not None
        self.outbox.append(m.Abandoned(self.shard, self.run.snapshot, reason))
        self.run = None


@dataclass
class Loader(Process):
    """checkpoint/load.py: fills the slots that wait for shards of a drained checkpoint.

    ``stored`` says that its SMP has answered the last Loaded: then it ends well.
    """

    world: str = ""
    snapshot: SnapshotId = SnapshotId(0, 0)
    iteration: int = 0
    files: dict[str, Tag] = field(default_factory=dict)
    arenas: dict[str, MemoryArena] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    target: MemorySlot | None = None
    part: int = 0
    stored: int = 0

    def key(self) -> tuple[str, str]:
        return "encoder", self.world

    def writing(self) -> bool:
        return self.target is not None

    def step(self) -> None:
        """Find the slot that waits, fill one part of it, or report the shard."""
        shard = self.left[0]
        if self.target is None:
            waiting = [
                slot
                for slot in self.arenas[shard].slots
                if slot.header.state == SlotState.REBUILDING
                and slot.header.snapshot == self.snapshot
            ]
            if not waiting:
                self.doomed = True
                return
            self.target, self.part = waiting[0], 0
        elif self.part < len(self.target.data):
            self.target.write_data(self.part, self.files[shard])
            self.part += 1
        else:
            record = record_of(self.snapshot, shard, self.iteration)
            self.outbox.append(m.Loaded(self.world, record))
            self.left.pop(0)
            self.target = None


@dataclass
class Reader:
    """A reader of checkpoint/live.py: it has pinned a snapshot, reads its parts, looks once more.

    ``pinned_by`` is what the node's ``pins_hold`` was when the pin was given.
    """

    number: int
    node: str
    snapshot: SnapshotId
    slots: list[tuple[str, MemorySlot]]
    pinned_by: tuple[Any, ...]
    read: list[tuple[str, Tag | None]] = field(default_factory=list)

    def step(self) -> None:
        parts = len(self.slots[0][1].data)
        shard, slot = self.slots[len(self.read) // parts]
        self.read.append((shard, slot.data[len(self.read) % parts]))

    def done(self) -> bool:
        return len(self.read) == sum(len(slot.data) for _, slot in self.slots)

    def unchanged(self) -> bool:
        """The last look: whether the headers still name what was read."""
        return all(
            slot.header.record is not None and slot.header.record.snapshot == self.snapshot
            for _, slot in self.slots
        )

    def wrong(self) -> list[Tag | None]:
        return [tag for shard, tag in self.read if tag not in ((self.snapshot, shard), DAMAGED)]

    def whole(self) -> bool:
        """Whether all that was read matches its digests."""
        return all(tag == (self.snapshot, shard) for shard, tag in self.read)
