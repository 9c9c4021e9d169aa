"""Snapshots in the arenas of a job, running or stopped, as a source to read from.

Where an SMP runs, the snapshot is pinned with it for as long as it is read; where none
runs, arenas are read as they lie.  Either way a slot's header is looked at again after
the last read, since an SMP that was restarted has forgotten its readers.

A shard that is lost or damaged in memory, computed from its stripe for a reader.

Nothing is written to arenas: a reader gets a private copy, checked against the digests that were
taken at capture.  Repairing the arenas is left to the job's scrub and its recoveries.

Arenas opened to read: what they hold, and one snapshot of them verified and watched.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.decide import Holding, candidates, owners
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes, SnapshotInfo, verified_shard
from megatron_ft.core.errors import ArenaError, ConfigError, SnapshotUnavailableError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import CorruptMemberError, DataCheck, ParityCheck, digest_table_of
from megatron_ft.erasure.member import MemberView, StripeCode, code_of, member_of
from megatron_ft.erasure.mending import block_of
from megatron_ft.erasure.repair import Checks, RowSolver, piece_of, place_of
from megatron_ft.rpc.local_query import pinned
from megatron_ft.rpc.messages import Inventory, SlotReport
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.smp.store import SUFFIX, ArenaStore


@dataclass(frozen=True)
class Survivors:
    """Members of one stripe that hold a protected snapshot, by their number in the stripe.

    ``table`` has the record of every member, as all survivors stored it.
    """

    holdings: Mapping[int, Holding]
    table: tuple[SealedRecord, ...]
    missing: int

    @classmethod
    def find(
        cls, holdings: Mapping[str, Holding], shard_id: str, snapshot: SnapshotId
    ) -> Survivors:
        """Those that can rebuild ``shard_id``; SnapshotUnavailableError if they are too few."""
        naming = [h.arena for h in holdings.values() if shard_id in h.arena.members]
        if not naming:
            raise SnapshotUnavailableError(f"no arena here is of a stripe with {shard_id}")
        newest = max(naming, key=lambda arena: arena.incarnation)
        found, tables = {}, set()
        for number, member in enumerate(newest.members):
            holding = holdings.get(member)
            slot = None if holding is None else holding.slot(snapshot)
            if holding is None or slot is None or member == shard_id:
                continue
            table = slot.stripe_table
            if not slot.parity_valid or len(table) <= number or slot.record != table[number]:
                continue
            found[number] = holding
            tables.add(table)
        if len(found) < newest.data_members:
            raise SnapshotUnavailableError(
                f"{len(found)} of the other {len(newest.members) - 1} shards of its stripe are here"
                f" with parity, and a rebuild needs {newest.data_members}"
            )
        if len(tables) > 1:
            raise SnapshotUnavailableError("the shards of its stripe disagree on what it held")
        return cls(found, tables.pop(), newest.members.index(shard_id))

    @property
    def record(self) -> SealedRecord:
        """What the missing shard held."""
        return self.table[self.missing]


def rebuild(
    survivors: Survivors,
    snapshot: SnapshotId,
    arenas: Mapping[tuple[str, str], Arena],
    own: Arena | None,
) -> Bytes:
    """The sealed region of the missing shard in new memory; the caller verifies it.

    Blocks of ``own``, the shard's arena if there is one, are used where their digests match.
    SnapshotUnavailableError names the first block for which too few right ones are left.
    """
    members = {
        number: (arenas[holding.node, holding.arena.shard_id], _slot(holding, snapshot))
        for number, holding in survivors.holdings.items()
    }
    code = code_of(next(iter(members.values()))[0].header)
    views = {n: member_of(arena, slot, arena.slot(slot)) for n, (arena, slot) in members.items()}
    checks = {number: _checks(code, view) for number, view in views.items()}
    mine, my_check = _own_view(own, snapshot, survivors.record, code)
    solver, size = RowSolver(code), code.block_bytes
    result: Bytes = np.zeros(code.data_bytes, np.uint8)
    for block in range(-(-survivors.record.used_bytes // size)):
        into = block_of(code, result, block)
        if mine is not None and my_check is not None:
            held = block_of(code, mine.data, block)
            if not my_check.bad_blocks(block * size, held):
                into[:] = held
                continue
        place = place_of(code, survivors.missing, block, parity=False)
        part = slice(place.offset, place.offset + size)
        pieces = {n: piece_of(code, view, n, place.row, part) for n, view in views.items()}
        solved = solver.solve_block(place, survivors.missing, pieces, checks)
        if solved is None:
            raise SnapshotUnavailableError(
                f"at block {block} fewer than {code.data_members} shards of its stripe are right"
            )
        into[:] = solved
    return result


def _slot(holding: Holding, snapshot: SnapshotId) -> int:
    report = holding.slot(snapshot)
    assert report is not None, "survivors hold the snapshot"
    return report.slot


def _checks(code: StripeCode, view: MemberView) -> Checks:
    assert view.record is not None, "survivors have sealed their slot"
    data = parity = None
    with suppress(CorruptMemberError):
        data = DataCheck(code, view.record, digest_table_of(view))
    with suppress(CorruptMemberError):
        parity = ParityCheck(code, view.record.shard_id, view.parity_digests, view.parity_root)
    return data, parity


def _own_view(
    own: Arena | None, snapshot: SnapshotId, record: SealedRecord, code: StripeCode
) -> tuple[MemberView | None, DataCheck | None]:
    """The slot of the shard's own arena that holds this record, if its digest table is right."""
    if own is None or code_of(own.header) != code:
        return None, None
    for slot in range(own.geometry.slot_count):
        with suppress(CorruptMemberError, ArenaError):
            header = own.slot(slot)
            if header.snapshot == snapshot and header.record == record:
                view = member_of(own, slot, header)
                # A copy, as the slot may be given up meanwhile.
                return view, DataCheck(code, record, digest_table_of(view).copy())
    return None, None


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
        """See SnapshotSource."""
        return self._problems

    def snapshots(self) -> list[SnapshotInfo]:
        """See SnapshotSource; one whose outcome is still open is left out."""
        with scan(self._folders) as memory:
            infos, self._problems = complete_snapshots(memory, self._known)
        return infos

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        """See SnapshotSource."""
        with scan(self._folders) as memory:
            shards = self._known | _members(memory.holdings)
            nodes = {memory.holdings[s].node for s in shards if s in memory.holdings}
            with (
                pinned([memory.folders[node] for node in sorted(nodes)], info.snapshot),
                hold(memory, info, shards) as opened,
            ):
                yield opened


def _members(holdings: Mapping[str, Holding]) -> set[str]:
    """Every shard that some arena names as one of its stripe."""
    return {member for holding in holdings.values() for member in holding.arena.members}


def complete_snapshots(
    memory: Memory, known: Collection[str] = ()
) -> tuple[list[SnapshotInfo], tuple[str, ...]]:
    """Decided snapshots that every shard holds, or that parity gives back for those that do not,
    newest first; and what is in the way of others.
    """
    shards = _members(memory.holdings) | set(known)
    infos: list[SnapshotInfo] = []
    problems, undecided = list(memory.damaged), []
    missing = sorted(shards - memory.holdings.keys())
    if missing:
        problems.append(f"no arena of {', '.join(missing)}: its node is lost, or elsewhere")
    for snapshot in candidates(memory.holdings):
        slots = {s: h.slot(snapshot) for s, h in memory.holdings.items()}
        held = [slot for slot in slots.values() if slot is not None]
        absent = sorted(s for s in shards if slots.get(s) is None)
        lacking = [s for s in absent if not _can_be_rebuilt(memory.holdings, s, snapshot)]
        if not _decided(held):
            undecided.append(f"snapshot {snapshot} is not committed")
        elif lacking:
            problems.append(f"snapshot {snapshot} is not held by {', '.join(lacking)}")
        else:
            level = "protected" if all(slot.parity_valid for slot in held) else "local"
            infos.append(SnapshotInfo(snapshot, held[0].iteration, level))
    # Beside a complete one, a snapshot that is still on its way is nothing to worry about.
    return infos, tuple(problems if infos else problems + undecided)


def _can_be_rebuilt(holdings: Mapping[str, Holding], shard_id: str, snapshot: SnapshotId) -> bool:
    try:
        Survivors.find(holdings, shard_id, snapshot)
    except SnapshotUnavailableError:
        return False
    return True


def _decided(slots: Sequence[SlotReport]) -> bool:
    """Rule 6: one COMMITTED slot, or PROTECTED everywhere, can only become COMMITTED everywhere."""
    states = {SlotState(slot.state) for slot in slots}
    # Committed without parity, and given some just now.
    again = any(slot.state == SlotState.ENCODING and slot.local_only for slot in slots)
    return again or SlotState.COMMITTED in states or states == {SlotState.PROTECTED}
