"""The arenas of a whole job in one folder: protected, lost and rebuilt with the real code.

Stripes are planned from the shards' places as the coordinator would, one virtual node per
``ranks_per_node`` ranks; encoders are threads.  Imports neither torch nor a framework.
"""

from __future__ import annotations

import itertools
import pickle
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import ArenaHeader, Geometry, SlotHeader, SlotState
from megatron_ft.checkpoint.source import OpenSnapshot, SnapshotInfo, verified_shard
from megatron_ft.core.identity import Ancestor, SealedRecord
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.orders import OrderRunner
from megatron_ft.erasure.stripes import RankPlace, StripePlan, plan_stripes
from megatron_ft.rpc.messages import Encoded, EncodeOrder, RebuildOrder, Rebuilt, StripeOrder
from megatron_ft.supervisor.replicas import ReplicaComparison
from tests.support.erasure_samples import ThreadTransport, ThreadWorld

BLOCK_BYTES = 4096
JOB = uuid.UUID(int=7)
SLOT = 0


def plan(places: Sequence[RankPlace], scheme: str) -> tuple[StripePlan, ...]:
    return plan_stripes(places, Scheme.parse(scheme), block_bytes=BLOCK_BYTES)


def header_of(shard_id: str, stripes: Sequence[StripePlan]) -> ArenaHeader:
    stripe = next(stripe for stripe in stripes if shard_id in stripe.members)
    return ArenaHeader(
        job=JOB,
        shard_id=shard_id,
        incarnation=1,
        lineage=(Ancestor(1, None),),
        codec=stripe.kind,
        data_members=stripe.data_members,
        parity_members=stripe.parity_members,
        member_index=stripe.members.index(shard_id),
        members=stripe.members,
        geometry=Geometry.for_stripe(
            slot_count=1,
            required_bytes=stripe.data_bytes,
            data_members=stripe.data_members,
            parity_members=stripe.parity_members,
            block_bytes=BLOCK_BYTES,
        ),
    )


def arena_path(folder: Path, shard_id: str) -> Path:
    return folder / f"{shard_id}.arena"


def record_path(folder: Path, shard_id: str) -> Path:
    """Where the test client keeps what a shard's seal returned; a real SMP knows it."""
    return folder / f"{shard_id}.record"


def replicas_path(folder: Path, shard_id: str) -> Path:
    return folder / f"{shard_id}.replicas"


def compared_replicas(folder: Path) -> set[str]:
    """Names of all tensors that ranks have compared; fails unless they are equal."""
    reports = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.replicas")}
    comparison = ReplicaComparison()
    verdict = comparison.compare(reports, dict.fromkeys(reports, ""))
    assert not verdict.unlike, f"not equal: {comparison.describe(verdict.unlike)}"
    return {name for names in comparison.names.values() for name in names}


def read_record(folder: Path, shard_id: str) -> SealedRecord:
    """What the shard's bytes must prove to be."""
    record: SealedRecord = pickle.loads(record_path(folder, shard_id).read_bytes())
    return record


def open_arenas(folder: Path, stack: ExitStack) -> OpenSnapshot:
    """The snapshot in a folder of arenas, every byte of it verified."""
    shards = {}
    for path in sorted(folder.glob("*.arena")):
        arena = stack.enter_context(Arena.open(path))
        header, record = arena.header, read_record(folder, path.stem)
        shards[path.stem] = verified_shard(
            arena.data(SLOT),
            record,
            header.geometry.block_bytes,
            str(path),
        )
    info = SnapshotInfo(record.snapshot, record.iteration, "protected")
    return OpenSnapshot(info, uuid.uuid4(), (), shards, lambda: None)


@dataclass(frozen=True)
class ArenaFolder:
    """A job's arenas after a run has sealed one snapshot into slot 0 of each."""

    folder: Path
    stripes: tuple[StripePlan, ...]

    @classmethod
    def of(cls, folder: Path) -> ArenaFolder:
        """The folder with the plan that its ranks agreed on."""
        return cls(folder, pickle.loads((folder / "stripes").read_bytes()))

    @property
    def nodes(self) -> list[str]:
        """All nodes in order; a node's place is its encoder's rank."""
        return sorted({node for stripe in self.stripes for node in stripe.nodes})

    def shards_of(self, node: str) -> list[str]:
        pairs = (zip(s.members, s.nodes, strict=True) for s in self.stripes)
        return [shard for shard, at in itertools.chain.from_iterable(pairs) if at == node]

    def protect(self) -> None:
        """Compute the parity of all stripes, and note in the slots what an SMP would."""
        for stripe in self.stripes:
            for shard in stripe.members:
                record = read_record(self.folder, shard)
                self._write_slot(shard, SlotHeader(SlotState.SEALED, record=record))
        for done in self._ordered(EncodeOrder):
            assert isinstance(done, Encoded)
            self._store(done.shard_id, SlotState.PROTECTED, done)

    def copy_to(self, folder: Path) -> ArenaFolder:
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)

    def lose(self, nodes: Sequence[str]) -> list[str]:
        """Delete all that these nodes held, then rebuild it from parity; the shards lost."""
        lost = [shard for node in nodes for shard in self.shards_of(node)]
        for shard in lost:
            arena_path(self.folder, shard).unlink()
            record_path(self.folder, shard).unlink()
            Arena.create(arena_path(self.folder, shard), header_of(shard, self.stripes)).close()
        for done in self._ordered(RebuildOrder, lost):
            assert isinstance(done, Rebuilt)
            record_path(self.folder, done.shard_id).write_bytes(pickle.dumps(done.record))
            self._store(done.shard_id, SlotState.COMMITTED, done)
        return lost

    def data(self, shard: str) -> bytes:
        """The bytes of a shard's slot."""
        with Arena.open(arena_path(self.folder, shard), job=JOB) as arena:
            return np.array(arena.data(SLOT)).tobytes()

    def _store(self, shard: str, state: SlotState, done: Encoded | Rebuilt) -> None:
        header = SlotHeader(
            state,
            done.snapshot,
            record=read_record(self.folder, shard),
            parity_valid=True,
            parity_root=done.parity_root,
            stripe_table=done.stripe_table,
        )
        self._write_slot(shard, header)

    def _write_slot(self, shard: str, header: SlotHeader) -> None:
        with Arena.open(arena_path(self.folder, shard), job=JOB) as arena:
            arena.write_slot(SLOT, header)

    def _ordered(
        self, kind: type[EncodeOrder] | type[RebuildOrder], lost: Sequence[str] = ()
    ) -> list[Encoded | Rebuilt]:
        """Carry out one order on all nodes at once; what the members reported."""
        survivor = next(s for p in self.stripes for s in p.members if s not in lost)
        snapshot = read_record(self.folder, survivor).snapshot

        def work(rank: int, transport: ThreadTransport) -> list[Encoded | Rebuilt]:
            stripes = tuple(self._order(p, rank, lost) for p in self._affected(lost))
            order = kind(snapshot=snapshot, world="test", stripes=stripes)
            connect: Any = lambda: transport  # noqa: E731
            reports = list(OrderRunner(JOB, connect).run(order))
            return [report for report in reports if isinstance(report, Encoded | Rebuilt)]

        results = ThreadWorld(len(self.nodes)).run(work)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [report for reports in results for report in reports]  # type: ignore[union-attr]

    def _affected(self, lost: Sequence[str]) -> list[StripePlan]:
        return [p for p in self.stripes if not lost or set(lost) & set(p.members)]

    def _order(self, plan: StripePlan, rank: int, lost: Sequence[str]) -> StripeOrder:
        world_ranks = tuple(self.nodes.index(node) for node in plan.nodes)
        local = [s for s, at in zip(plan.members, world_ranks, strict=True) if at == rank]
        return StripeOrder(
            index=plan.index,
            kind=plan.kind,
            data_members=plan.data_members,
            parity_members=plan.parity_members,
            data_bytes=plan.data_bytes,
            block_bytes=BLOCK_BYTES,
            members=plan.members,
            world_ranks=world_ranks,
            arenas={shard: str(arena_path(self.folder, shard)) for shard in local},
            slots={shard: SLOT for shard in local},
            lost=tuple(shard for shard in lost if shard in plan.members),
        )
