"""Encoders of the protocol model: one world of them computes or rebuilds together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.identity import SealedRecord
from megatron_ft.rpc import messages as m
from tests.protocol.model.memory import MemoryArena, MemorySlot, Tag
from tests.protocol.model.processes import Process

Order = m.EncodeOrder | m.RebuildOrder


@dataclass
class Session:
    """What the members of one stripe share through MPI while they carry out one order."""

    views: dict[int, MemorySlot] = field(default_factory=dict)
    tables: dict[int, tuple[SealedRecord, ...]] = field(default_factory=dict)
    records: dict[str, SealedRecord] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


@dataclass
class MpiWorld:
    """One MPI world: what is under way in it, and whether a rank of it has died."""

    sessions: dict[Any, Session] = field(default_factory=dict)
    broken: bool = False


@dataclass
class Encoder(Process):
    """erasure/worker.py: per stripe introduce, (read, write) for each part, barrier, report.

    Read and write are two steps: what a suspended encoder has read it writes when it wakes.
    A ``coarse`` one takes an order and introduces itself at once, and reports at once.
    """

    world: str = ""
    rank: int = 0
    coarse: bool = False
    inbox: list[Any] = field(default_factory=list)
    mpi: MpiWorld = field(default_factory=MpiWorld)
    order: Order | None = None
    taken: int = 0
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
        if self.number == len(self.order.stripes) or self.stage == 0:
            return True
        session, size = self._session(), len(self._stripe().members)
        everyone = len(session.views) == size
        name = self._stages()[self.stage]
        if name == Encoder._read:
            return everyone and not self.mpi.broken
        if name == Encoder._report:
            return len(session.finished) == size
        return everyone

    def step(self, arenas: Mapping[str, MemoryArena]) -> None:
        """One step; ``arenas`` are those of its node."""
        if self.order is None:
            self.order, self.number, self.stage = self.inbox.pop(0), 0, 0
            self.taken += 1
            if self.coarse:
                self._introduce(arenas)
        elif self.number == len(self.order.stripes):
            self._done()
        elif self.stage == 0:
            self._introduce(arenas)
        else:
            stage = self._stages()[self.stage]
            stage(self)
            if self.coarse and self.order is not None:
                self._hurry(stage)

    def _hurry(self, stage: Callable[[Encoder], None]) -> None:
        """What in a coarse world follows at once."""
        if stage == Encoder._write and self._stages()[self.stage] == Encoder._finish:
            self._finish()
        assert self.order is not None
        if stage == Encoder._report and self.number == len(self.order.stripes):
            self._done()

    def _stages(self) -> list[Callable[[Encoder], None]]:
        """What comes after the introduction, at its number."""
        parts = len(next(iter(self._session().views.values())).data)
        work = [Encoder._read, Encoder._write] * parts
        return [Encoder._finish, *work, Encoder._finish, Encoder._report]

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
        key = (self.taken, type(self.order), self.order.snapshot, self._stripe().index)
        return self.mpi.sessions.setdefault(key, Session())

    def _introduce(self, arenas: Mapping[str, MemoryArena]) -> None:
        assert self.order is not None
        stripe, shard = self._stripe(), self._shard()
        if shard not in arenas:
            self._fail(f"{shard} is not here")
            return
        slot = arenas[shard].slots[stripe.slots[shard]]
        sealed = slot.header.record
        if not self._lost() and (sealed is None or sealed.snapshot != self.order.snapshot):
            self._fail(f"{shard} holds no sealed shard")
            return
        session, member = self._session(), self._member()
        session.views[member] = slot
        if not self._lost() and sealed is not None:
            session.tables[member] = slot.header.stripe_table
            session.records |= {r.shard_id: r for r in (*slot.header.stripe_table, sealed)}
        self.stage = 1

    def _read(self) -> None:
        part = (self.stage - 1) // 2
        self.buffer = None
        if isinstance(self.order, m.EncodeOrder):
            self.buffer = self._gather(part)
        elif self._lost():
            self.buffer = self._reconstruct(part)
        if self.order is not None:
            self.stage += 1

    def _gather(self, part: int) -> frozenset[Tag] | None:
        """Every block is checked against its digest before it is coded."""
        assert self.order is not None
        tags = set()
        for member, view in self._session().views.items():
            tag = (self.order.snapshot, self._stripe().members[member])
            if view.data[part] != tag:
                self._fail("wrong bytes", tag[1])
                return None
            tags.add(tag)
        return frozenset(tags)

    def _reconstruct(self, part: int) -> tuple[Tag, frozenset[Tag]] | None:
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
            wrong = view.data[part] != (self.order.snapshot, shard)
            if wrong or view.parity[part] != whole:
                self._fail("wrong bytes", shard)
                return None
        return (self.order.snapshot, self._shard()), whole

    def _write(self) -> None:
        part = (self.stage - 2) // 2
        view = self._session().views[self._member()]
        if isinstance(self.order, m.EncodeOrder):
            view.write_parity(part, self.buffer)
        elif self._lost():
            view.write_data(part, self.buffer[0])
            view.write_parity(part, self.buffer[1])
        self.stage += 1

    def _finish(self) -> None:
        self._session().finished.add(self._member())
        self.stage += 1

    def _report(self) -> None:
        assert self.order is not None
        stripe, order, known = self._stripe(), self.order, self._session().records
        root, world, shard = b"p".ljust(32), self.world, self._shard()
        if isinstance(order, m.EncodeOrder):
            table = tuple(known[shard] for shard in stripe.members)
            self.outbox.append(m.Encoded(order.snapshot, world, shard, root, table, 0, 0.0))
        elif isinstance(order, m.RebuildOrder) and self._lost():
            table = tuple(known[shard] for shard in stripe.members)
            record = known[shard]
            body = m.Rebuilt(order.snapshot, world, shard, record, root, table, 0, 0.0)
            self.outbox.append(body)
        self.number, self.stage = self.number + 1, 0

    def _done(self) -> None:
        assert self.order is not None
        self.outbox.append(m.OrderDone(self.order.snapshot, self.world))
        self.order = None

    def _fail(self, reason: str, corrupt: str = "") -> None:
        """Report, and end the world by leaving it."""
        assert self.order is not None
        failure = m.OrderFailed(self.order.snapshot, self.world, reason, corrupt)
        self.outbox.append(failure)
        self.order, self.doomed = None, True
