"""Reads snapshots from the arenas of a job, running or stopped.

Where an SMP runs, the snapshot is pinned with it for as long as it is read; where none
runs, arenas are read as they lie.  Either way a slot's header is read again after the last
byte, since an SMP that was restarted has forgotten its readers.  A shard that is lost or
damaged is rebuilt by the job's next start, and not here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint.decide import Holding, candidates, owners
from megatron_ft.checkpoint.source import (
    OpenSnapshot,
    ShardBytes,
    ShardParts,
    SnapshotInfo,
    describe_damage,
    verified_shard,
)
from megatron_ft.core.errors import ArenaError, ConfigError, SnapshotUnavailableError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.rpc.local_query import pinned
from megatron_ft.rpc.messages import Inventory
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import SUFFIX, ArenaStore


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
        """The job's lineage, from the arena of its latest incarnation."""
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
    """Verify these shards of a snapshot, and notice if they are given up meanwhile."""
    held, check = _find(memory, info, shards)
    opened = {shard_id: one.verified() for shard_id, one in held.items()}
    check()
    yield OpenSnapshot(info, memory.job, memory.lineage, opened, check)
    check()


def _find(
    memory: Memory, info: SnapshotInfo, shards: Collection[str]
) -> tuple[dict[str, _Held], Callable[[], None]]:
    """The slots of a snapshot, and the check that they still are what they were."""
    held = {shard_id: _Held.find(memory, shard_id, info.snapshot) for shard_id in sorted(shards)}

    def check() -> None:
        for one in held.values():
            one.check()

    return held, check


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
        number = holding.arena.slots.index(report)
        return cls(memory.arenas[holding.node, shard_id], number, report.record)

    def verified(self) -> ShardBytes:
        header = self.arena.header
        return verified_shard(
            self.arena.data(self.slot),
            self.record,
            header.geometry.block_bytes,
            str(self.arena.path),
        )

    def parts(self) -> ShardParts:
        data, origin = self.arena.data(self.slot), str(self.arena.path)
        block = self.arena.header.geometry.block_bytes
        blocks = digest.BlockCheck(data, self.record, block)

        def read(start: int, stop: int) -> NDArray[np.uint8]:
            if bad := blocks.bad(start // block, -(-stop // block)):
                raise SnapshotUnavailableError(describe_damage(self.record, bad, block, origin))
            return data[start:stop]

        return ShardParts.of(self.record, read, origin)

    def check(self) -> None:
        """True if the slot still is what it was: its header changes before its bytes do."""
        if self.arena.slot(self.slot).record != self.record:
            raise SnapshotUnavailableError(
                f"snapshot {self.record.snapshot} was given up in {self.arena.path} while it was "
                "read: the job was restarted meanwhile. Nothing made from it may be used; try again"
            )


def open_live(root: Path, job: str, *, shards: Collection[str] = ()) -> LiveSource:
    """The arenas of ``job`` under ``root``, those of all its nodes on this machine.

    ``shards`` are shard ids that the job is known to have; without them a shard whose
    stripe left no trace (a lost node of a job without parity) cannot be missed.
    ConfigError if there is no such job.
    """
    folders = node_folders(root / job)
    if not folders:
        raise ConfigError(
            f"no arenas of a job {job!r} under {root}; `megatron-ft status` lists the jobs here, "
            "--arena-dir names another folder"
        )
    return LiveSource(folders, shards)


def node_folders(job_folder: Path) -> list[Path]:
    """Folders of the job's nodes that hold arenas; links are not followed."""
    return sorted(
        folder
        for folder in job_folder.glob("[!.]*")
        if not folder.is_symlink() and any(folder.glob(f"*{SUFFIX}"))
    )


class LiveSource:
    """A SnapshotSource over the arenas in some nodes' folders."""

    def __init__(self, folders: Sequence[Path], shards: Collection[str] = ()) -> None:
        self._folders, self._known = list(folders), set(shards)
        self._problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"the memory in {self._folders[0].parent}"

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems

    def snapshots(self) -> list[SnapshotInfo]:
        """See SnapshotSource; one whose outcome is still open is left out."""
        with scan(self._folders) as memory:
            infos, self._problems = complete_snapshots(memory, self._known)
        return infos

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        with self._pinned(info) as (memory, shards), hold(memory, info, shards) as opened:
            yield opened

    @contextmanager
    def open_parts(self, info: SnapshotInfo) -> Iterator[dict[str, ShardParts]]:
        with self._pinned(info) as (memory, shards):
            held, check = _find(memory, info, shards)
            yield {shard_id: one.parts() for shard_id, one in held.items()}
            check()

    @contextmanager
    def _pinned(self, info: SnapshotInfo) -> Iterator[tuple[Memory, set[str]]]:
        """The arenas, with a snapshot that their SMPs keep, and the shards it should have."""
        with scan(self._folders) as memory:
            nodes = sorted({holding.node for holding in memory.holdings.values()})
            with pinned([memory.folders[node] for node in nodes], info.snapshot):
                yield memory, self._known | _members(memory.holdings)


def _members(holdings: Mapping[str, Holding]) -> set[str]:
    """Every shard that some arena names as one of its stripe."""
    return {member for holding in holdings.values() for member in holding.arena.members}


def complete_snapshots(
    memory: Memory, known: Collection[str] = ()
) -> tuple[list[SnapshotInfo], tuple[str, ...]]:
    """Decided snapshots that every shard holds, newest first; and what is in the way of others."""
    shards = _members(memory.holdings) | set(known)
    infos: list[SnapshotInfo] = []
    problems, undecided = list(memory.damaged), []
    missing = sorted(shards - memory.holdings.keys())
    if missing:
        problems.append(f"no arena of {', '.join(missing)}: its node is lost, or elsewhere")
    for snapshot in candidates(memory.holdings):
        slots = {s: h.slot(snapshot) for s, h in memory.holdings.items()}
        held = [slot for slot in slots.values() if slot is not None]
        lacking = sorted(s for s in shards if slots.get(s) is None)
        if not _decided(held):
            undecided.append(f"snapshot {snapshot} is not committed")
        elif lacking:
            problems.append(f"snapshot {snapshot} is not held by {', '.join(lacking)}")
        else:
            level = "protected" if all(slot.parity_valid for slot in held) else "local"
            infos.append(SnapshotInfo(snapshot, held[0].iteration, level))
    # Where one is complete, a snapshot that is still on its way is not a problem.
    return infos, tuple(problems if infos else problems + undecided)


def _decided(slots: Sequence[SlotHeader]) -> bool:
    """Rule 6: one COMMITTED slot, or PROTECTED everywhere, can only become COMMITTED everywhere."""
    states = {SlotState(slot.state) for slot in slots}
    # Committed without parity, and given some just now.
    again = any(slot.state == SlotState.ENCODING and slot.local_only for slot in slots)
    return again or SlotState.COMMITTED in states or states == {SlotState.PROTECTED}
