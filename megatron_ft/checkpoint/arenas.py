"""Arenas opened to read: what they hold, and one snapshot of them verified and watched."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.decide import Holding, owners
from megatron_ft.checkpoint.rebuilt import Survivors, rebuild
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes, SnapshotInfo, verified_shard
from megatron_ft.core.errors import ArenaError, SnapshotUnavailableError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.rpc.messages import Inventory
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.store import SUFFIX, ArenaStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Arenas of one job as their headers were when they were opened."""

    job: uuid.UUID
    folders: Mapping[str, Path]
    arenas: Mapping[tuple[str, str], Arena]
    holdings: Mapping[str, Holding]
    damaged: tuple[str, ...]

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The job's lineage, from the arena of its latest life."""
        arenas = [holding.arena for holding in self.holdings.values()]
        return max(arenas, key=lambda arena: arena.incarnation).lineage if arenas else ()


@contextmanager
def scan(folders: Sequence[Path]) -> Iterator[Memory]:
    """Open every arena in these nodes' folders; closed again at the end.

    SnapshotUnavailableError if nothing can be read, or the arenas are of several jobs.
    """
    job = _job_of(folders)
    with ExitStack() as opened:
        inventories: list[Inventory] = []
        arenas: dict[tuple[str, str], Arena] = {}
        damaged: list[str] = []
        for folder in folders:
            machine, store = NodeMachine(folder.name), ArenaStore(folder, job)
            opened.callback(_close, store)
            store.adopt(machine)
            inventories.append(
                Inventory(folder.name, machine.highest_incarnation, store.reports(machine))
            )
            arenas |= {(folder.name, shard): arena for shard, arena in store.arenas.items()}
            damaged += [*store.damaged.values(), *store.foreign]
        places = {folder.name: folder for folder in folders}
        yield Memory(job, places, arenas, owners(inventories), tuple(damaged))


def _close(store: ArenaStore) -> None:
    for arena in store.arenas.values():
        arena.close()


def _job_of(folders: Sequence[Path]) -> uuid.UUID:
    jobs: set[uuid.UUID] = set()
    damaged = []
    for path in (path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))):
        try:
            with Arena.open(path) as arena:
                jobs.add(arena.header.job)
        except ArenaError as error:
            damaged.append(str(error))
    if len(jobs) == 1:
        return jobs.pop()
    where = ", ".join(map(str, folders))
    if jobs:
        raise SnapshotUnavailableError(
            f"{where} hold arenas of {len(jobs)} different jobs: remove those of the older ones"
        )
    raise SnapshotUnavailableError(f"no arena in {where} can be read: {'; '.join(damaged)}")


@contextmanager
def hold(memory: Memory, info: SnapshotInfo, shards: Collection[str]) -> Iterator[OpenSnapshot]:
    """Verify these shards of a snapshot and keep them from being overwritten meanwhile.

    One that is lost or damaged is rebuilt where ``memory`` holds enough of its stripe.
    """
    held: list[_Held] = []
    opened: dict[str, ShardBytes] = {}
    for shard_id in sorted(shards):
        try:
            one = _Held.find(memory, shard_id, info.snapshot)
            opened[shard_id] = one.verified()
            held.append(one)
        except SnapshotUnavailableError as error:
            opened[shard_id] = _rebuilt(memory, shard_id, info.snapshot, error)

    def check() -> None:
        for one in held:
            one.check()

    check()
    yield OpenSnapshot(info, memory.job, memory.lineage, opened, check)
    check()


def _rebuilt(
    memory: Memory, shard_id: str, snapshot: SnapshotId, cause: SnapshotUnavailableError
) -> ShardBytes:
    """The shard from the rest of its stripe, every byte verified; ``cause`` is why."""
    log.warning("%s; it is rebuilt from parity", cause)
    holding = memory.holdings.get(shard_id)
    own = None if holding is None else memory.arenas[holding.node, shard_id]
    try:
        survivors = Survivors.find(memory.holdings, shard_id, snapshot)
        data = rebuild(survivors, snapshot, memory.arenas, own)
        stripe = next(iter(survivors.holdings.values())).arena
        data.flags.writeable = False
        where = "the parity of its stripe"
        block_bytes, algorithm = stripe.block_bytes, stripe.digest_algorithm
        return verified_shard(data, survivors.record, block_bytes, algorithm, where)
    except (SnapshotUnavailableError, ArenaError) as error:
        raise SnapshotUnavailableError(f"{cause}; parity does not replace it: {error}") from error


@dataclass(frozen=True)
class _Held:
    """One shard's slot that is being read."""

    arena: Arena
    slot: int
    record: SealedRecord

    @classmethod
    def find(cls, memory: Memory, shard_id: str, snapshot: SnapshotId) -> _Held:
        holding = memory.holdings.get(shard_id)
        report = None if holding is None else holding.slot(snapshot)
        if holding is None or report is None or report.record is None:
            where = "nowhere here" if holding is None else f"not in {memory.folders[holding.node]}"
            hint = "; ".join(memory.damaged) or "its node may be lost, or elsewhere"
            raise SnapshotUnavailableError(
                f"shard {shard_id} of snapshot {snapshot} is {where}: {hint}"
            )
        return cls(memory.arenas[holding.node, shard_id], report.slot, report.record)

    def verified(self) -> ShardBytes:
        header = self.arena.header
        return verified_shard(
            self.arena.data(self.slot),
            self.record,
            header.geometry.block_bytes,
            header.digest_algorithm,
            str(self.arena.path),
        )

    def check(self) -> None:
        """Whether the slot still is what it was: its header changes before its bytes do."""
        if self.arena.slot(self.slot).record != self.record:
            raise SnapshotUnavailableError(
                f"snapshot {self.record.snapshot} was given up in {self.arena.path} while it was "
                "read: the job was restarted meanwhile. Nothing made from it may be used; try again"
            )
