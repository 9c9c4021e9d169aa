"""Processes of the protocol model: trainers and encoders, with mappings of their own.

Each step is one that a signal, a crash or another process can come between.  A process
that is suspended takes no step; whoever resumes it lets it go on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol_memory import HALVES, MemoryArena, MemorySlot, record_of

from megatron_ft.arena.format import Permit
from megatron_ft.identity import SealedRecord, SnapshotId
from megatron_ft.smp import messages as m

Tag = tuple[SnapshotId, str]


@dataclass
class Process:
    """One operating system process; ``outbox`` is its end of the Unix socket."""

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
    """capture/manager.py and its copy thread, reduced to what touches shared memory."""

    shard: str = ""
    life: int = 0
    iteration: int = 0
    arena: MemoryArena | None = None
    last_permit: SnapshotId | None = None
    run: Permit | None = None
    copied: int = 0

    def key(self) -> tuple[str, str]:
        return "trainer", self.shard

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
            self.run, self.copied = permit, 0

    def copy(self) -> None:
        """One step of the running capture: a half of the bytes, or the seal."""
        assert self.run is not None and self.arena is not None
        if self.copied < HALVES:
            tag = (self.run.snapshot, self.shard)
            self.arena.slots[self.run.slot].data[self.copied] = tag
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
class Session:
    """What the members of one stripe share through MPI while they carry out one order."""

    views: dict[int, MemorySlot] = field(default_factory=dict)
    tables: dict[int, tuple[SealedRecord, ...]] = field(default_factory=dict)
    records: dict[str, SealedRecord] = field(default_factory=dict)
    members: dict[int, Encoder] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


@dataclass
class Encoder(Process):
    """erasure/worker.py: per stripe introduce, (read, write) for each half, barrier, report.

    Read and write are two steps: what a suspended encoder has read it writes when it wakes.
    """

    world: str = ""
    rank: int = 0
    inbox: list[Any] = field(default_factory=list)
    arenas: Callable[[str], MemoryArena] = field(default=lambda shard: _no_arena(shard))
    sessions: dict[Any, Session] = field(default_factory=dict)
    order: m.EncodeOrder | m.RebuildOrder | None = None
    number: int = 0
    stage: int = 0
    buffer: Any = None

    def key(self) -> tuple[str, str]:
        return "encoder", self.world

    def writing(self) -> bool:
        return self.order is not None

    def can_step(self) -> bool:
        if self.order is None:
            return bool(self.inbox)
        if self.number == len(self.order.stripes):
            return True
        session, stripe = self._session(), self._stripe()
        size = len(stripe.members)
        if self.stage == 0:
            return True
        everyone = len(session.members) == size
        if self.stage in (1, 3):  # reading needs living peers
            return everyone and all(p.alive for p in session.members.values())
        return everyone and (self.stage < 6 or len(session.finished) == size)

    def step(self) -> None:
        if self.order is None:
            self.order, self.number, self.stage = self.inbox.pop(0), 0, 0
        elif self.number == len(self.order.stripes):
            self.outbox.append(m.OrderDone(self.order.snapshot, self.world))
            self.order = None
        else:
            stages = [self._introduce, self._read, self._write, self._read, self._write]
            [*stages, self._finish, self._report][self.stage]()

    def _stripe(self) -> m.StripeOrder:
        assert self.order is not None
        return self.order.stripes[self.number]

    def _member(self) -> int:
        return self._stripe().world_ranks.index(self.rank)

    def _shard(self) -> str:
        return self._stripe().members[self._member()]

    def _lost(self) -> bool:
        return self._shard() in self._stripe().lost

    def _session(self) -> Session:
        assert self.order is not None
        key = (type(self.order), self.order.snapshot, self._stripe().index)
        return self.sessions.setdefault(key, Session())

    def _introduce(self) -> None:
        assert self.order is not None
        stripe, shard = self._stripe(), self._shard()
        slot = self.arenas(shard).slots[stripe.slots[shard]]
        sealed = slot.header.record
        if not self._lost() and (sealed is None or sealed.snapshot != self.order.snapshot):
            self._fail(f"{shard} holds no sealed shard")
            return
        session, member = self._session(), self._member()
        session.views[member], session.members[member] = slot, self
        if not self._lost() and sealed is not None:
            session.tables[member] = slot.header.stripe_table
            session.records |= {r.shard_id: r for r in (*slot.header.stripe_table, sealed)}
        self.stage = 1

    def _read(self) -> None:
        half = self.stage // 2
        self.buffer = None
        if isinstance(self.order, m.EncodeOrder):
            self.buffer = self._gather(half)
        elif self._lost():
            self.buffer = self._reconstruct(half)
        if self.order is not None:
            self.stage += 1

    def _gather(self, half: int) -> frozenset[Tag] | None:
        """Every block is checked against its digest before it is coded."""
        assert self.order is not None
        tags = set()
        for member, view in self._session().views.items():
            tag = (self.order.snapshot, self._stripe().members[member])
            if view.data[half] != tag:
                self._fail("wrong bytes", tag[1])
                return None
            tags.add(tag)
        return frozenset(tags)

    def _reconstruct(self, half: int) -> tuple[Tag, frozenset[Tag]] | None:
        assert self.order is not None
        stripe = self._stripe()
        whole = frozenset((self.order.snapshot, shard) for shard in stripe.members)
        for member, view in self._session().views.items():
            shard = stripe.members[member]
            if shard in stripe.lost:
                continue
            if len(self._session().tables[member]) != len(stripe.members):
                self._fail("no table to check against")
                return None
            wrong = view.data[half] != (self.order.snapshot, shard)
            if wrong or view.parity[half] != whole:
                self._fail("wrong bytes", shard)
                return None
        return (self.order.snapshot, self._shard()), whole

    def _write(self) -> None:
        half = self.stage // 2 - 1
        view = self._session().views[self._member()]
        if isinstance(self.order, m.EncodeOrder):
            view.parity[half] = self.buffer
        elif self._lost():
            view.data[half], view.parity[half] = self.buffer
        self.stage += 1

    def _finish(self) -> None:
        self._session().finished.add(self._member())
        self.stage = 6

    def _report(self) -> None:
        assert self.order is not None
        stripe, order, known = self._stripe(), self.order, self._session().records
        table = tuple(known[shard] for shard in stripe.members)
        root, world, shard = b"p".ljust(32), self.world, self._shard()
        if isinstance(order, m.EncodeOrder):
            self.outbox.append(m.Encoded(order.snapshot, world, shard, root, table, 0, 0.0))
        elif self._lost():
            record = known[shard]
            body = m.Rebuilt(order.snapshot, world, shard, record, root, table, 0, 0.0)
            self.outbox.append(body)
        self.number, self.stage = self.number + 1, 0

    def _fail(self, reason: str, corrupt: str = "") -> None:
        """Report, and end the world by leaving it."""
        assert self.order is not None
        failure = m.OrderFailed(self.order.snapshot, self.world, reason, corrupt)
        self.outbox.append(failure)
        self.order, self.doomed = None, True


@dataclass
class Reader:
    """A reader of disk/live.py: it has pinned a snapshot, reads its halves, looks once more.

    ``pinned_by`` is the SMP and the incarnation that the pin is good for.
    """

    number: int
    node: str
    snapshot: SnapshotId
    slots: list[tuple[str, MemorySlot]]
    pinned_by: tuple[Any, int]
    read: list[tuple[str, Tag | None]] = field(default_factory=list)

    def step(self) -> None:
        shard, slot = self.slots[len(self.read) // HALVES]
        self.read.append((shard, slot.data[len(self.read) % HALVES]))

    def done(self) -> bool:
        return len(self.read) == HALVES * len(self.slots)

    def unchanged(self) -> bool:
        """The last look: whether the headers still name what was read."""
        return all(
            slot.header.record is not None and slot.header.record.snapshot == self.snapshot
            for _, slot in self.slots
        )

    def wrong(self) -> list[Tag | None]:
        return [tag for shard, tag in self.read if tag != (self.snapshot, shard)]


def _no_arena(shard: str) -> MemoryArena:
    raise AssertionError(f"no arena of {shard}")
