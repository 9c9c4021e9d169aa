"""The arenas of one node: adopts, creates, mends and frees them, and writes their headers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron_ft.arena import files
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import fits
from megatron_ft.arena.format import (
    ArenaHeader,
    Geometry,
    Permit,
    SlotHeader,
    SlotState,
)
from megatron_ft.arena.limits import check_memory
from megatron_ft.core.errors import (
    ArenaError,
    ArenaForeignError,
    ArenaVersionError,
    ControlPlaneError,
    LayoutMismatchError,
)
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import StorePermit, StoreSlot
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine, SourceArena

log = logging.getLogger(__name__)

SUFFIX = ".arena"
SOURCE_SUFFIX = ".source"
"""Ending of an arena's name while it is a source of a reshape."""

LATER_BYTES = 64 << 20
"""Slots of fewer bytes get their memory all at once."""

_POINTS = {
    SlotState.CAPTURING: ("", "smp.capturing.stored"),
    SlotState.SEALED: ("smp.sealed", "smp.sealed.stored"),
    SlotState.ENCODING: ("", "smp.encoding.stored"),
    SlotState.PROTECTED: ("smp.protected", "smp.protected.stored"),
    SlotState.COMMITTED: ("smp.committed", "smp.committed.stored"),
    SlotState.FREE: ("smp.freed", "smp.freed.stored"),
}
"""Fault points before and after a slot's header of this state is stored."""


class ArenaStore:
    """All arenas in a node's folder.  The SMP that owns it is the only writer of headers.

    ``damaged`` says by file name why an arena that was here counts as lost, ``foreign`` what is not
    this job's and is never touched.  ``sources`` are arenas of an older layout, which are only
    read.
    """

    def __init__(self, directory: Path, job: uuid.UUID) -> None:
        self.directory = directory
        self.job = job
        self.arenas: dict[str, Arena] = {}
        self.sources: dict[str, Arena] = {}
        self._headers: dict[str, ArenaHeader] = {}
        self._permits: dict[str, Permit | None] = {}
        self._reached: dict[str, int] = {}
        """Progress of trainers whose arenas were set aside, for those that come after."""
        self.damaged: dict[str, str] = {}
        self.foreign: list[str] = []

    def adopt(self, machine: NodeMachine) -> None:
        """Open every arena that an earlier SMP left; what is not ours is named, not touched."""
        for path in self._paths():
            try:
                arena = Arena.open(path, job=self.job)
                if path.suffix == SOURCE_SUFFIX:
                    self._enter_source(arena, machine)
                else:
                    if arena.holes:  # it may have been a source
                        arena.reserve(first_slot=True)
                    self.enter(arena, machine)
                reach("adopt.arena")
            except (ArenaForeignError, ArenaVersionError) as error:
                self.foreign.append(str(error))
                continue
            except ArenaError as error:
                self.damaged[path.name] = str(error)
                continue
            machine.highest_incarnation = max(machine.highest_incarnation, arena.header.incarnation)

    def sanitize_files(self) -> None:
        """Before ``adopt``: set aside what is not a file of ours, and close the others to all."""
        for path in self._paths():
            reason = files.reason_in_the_way(path)
            if reason:
                aside = files.set_aside(path)
                self._lost(path.name, f"{path} {reason} (now {aside.name})")
                continue
            # The folder lets nobody else in, so a wrong mode has cost nothing.
            path.chmod(files.MODE)

    def quarantine_all(self, reason: str) -> None:
        """Before ``adopt``: count all arenas as lost, since their writers are unknown.

        They get other names.  A process that still writes does so where no reader looks.
        """
        for path in self._paths():
            aside = files.set_aside(path)
            self._lost(path.name, f"{reason} (now {aside})")

    def examine(self, machine: NodeMachine) -> None:
        """Mend what is wrong with the arenas; give up those that others could not open.

        The machine knows all that was written, so headers cost nothing.  A shard whose file was
        removed, replaced or cut counts as lost, and is rebuilt into a new one.
        """
        for shard_id, arena in list(self.arenas.items()):
            try:
                if not arena.in_place():
                    raise ArenaForeignError(f"{arena.path} was removed, replaced or cut")
                slots = machine.shards[shard_id].slots
                mended = arena.mend_records(self._headers[shard_id], slots, stale=True)
                if mended:
                    log.warning("%s was damaged and is mended: %s", arena.path, ", ".join(mended))
                Arena.open(arena.path, job=self.job).close()
            except (ArenaError, OSError) as error:
                self._lost(arena.path.name, str(error))
                self._forget(shard_id, machine).close_beside()

    def missing(self) -> str:
        """An arena whose file is gone, so that nothing of it could be restored; "" if none is."""
        for arena in self.arenas.values():
            if not arena.in_place():
                return f"{arena.path} was removed, replaced or cut"
        return ""

    def _lost(self, name: str, reason: str) -> None:
        self.damaged[name] = f"{reason}; the shard counts as lost"
        log.error("%s", self.damaged[name])

    def _paths(self) -> list[Path]:
        patterns = f"*{SUFFIX}", f"*{SOURCE_SUFFIX}"
        return sorted(path for pattern in patterns for path in self.directory.glob(pattern))

    def allocate(self, request: m.CreateArena) -> Arena | None:
        """Make the arena of one shard; slow, safe to call from another thread.

        None if the present one is the same.  Raises LayoutMismatchError when it differs,
        ArenaMemoryError when there is no room.
        """
        present = self.arenas.get(request.shard_id)
        if present is not None:
            _check_same(self._headers[request.shard_id], self._header(request))
            return None
        path = self.directory / f"{request.shard_id}{SUFFIX}"
        # What lies there now is damaged; foreign files have stopped the job before this.  Its
        # memory may be what the new arena needs.
        files.clear(path)
        header, owed = self._header(request), sum(a.holes for a in self.arenas.values())
        first = header.geometry.slot_span >= LATER_BYTES
        arena = Arena.create(path, header, replace=True, first_slot=first, owed=owed)
        arena.write_progress(self._reached.pop(request.shard_id, -1))
        if request.incarnation > 1:
            reach("rebuild.target")
        return arena

    def enter(self, arena: Arena, machine: NodeMachine) -> None:
        """Take an arena into the node's books."""
        header, slots = arena.header, ShardSlots(arena.header.shard_id, _slots(arena))
        slots.made = 1 if arena.holes else slots.made
        machine.shards[header.shard_id] = slots
        machine.paths[header.shard_id] = str(arena.path)
        self.arenas[header.shard_id] = arena
        self._headers[header.shard_id] = header
        self._permits.pop(header.shard_id, None)
        self.damaged.pop(arena.path.name, None)

    def check_record(self, record: SealedRecord) -> None:
        """ControlPlaneError unless a sealed record describes bytes that its arena can hold."""
        arena = self.arenas.get(record.shard_id)
        if arena is None:
            raise ControlPlaneError(f"shard {record.shard_id} is not on this node")
        if not fits(arena.geometry.data_bytes, record):
            raise ControlPlaneError(
                f"the record of {record.shard_id} describes bytes that its arena of "
                f"{arena.geometry.data_bytes} bytes a slot cannot hold"
            )

    def keep_only(self, shards: Collection[str], machine: NodeMachine) -> list[Arena]:
        """Forget the arenas of shards that do not live here any more; they are to be freed."""
        return [self._forget(shard_id, machine) for shard_id in self.arenas.keys() - set(shards)]

    def make_sources(self, snapshot: SnapshotId, machine: NodeMachine) -> None:
        """Make every arena a source, under a name that leaves room for one of another layout.

        Slots without ``snapshot`` give their memory to the new arenas.
        """
        for arena, spent in self.set_aside((snapshot,), machine, same_layout=False):
            release(arena, spent)

    def set_aside(
        self, keep: Collection[SnapshotId], machine: NodeMachine, *, same_layout: bool
    ) -> list[tuple[Arena, list[int]]]:
        """As ``make_sources``, for some snapshots; the slots whose memory is to be released.

        ``same_layout``: the new arenas are of the same shards, on the same nodes.
        """
        left = list[tuple[Arena, list[int]]]()
        for shard_id in list(self.arenas):
            self._reached[shard_id] = self.arenas[shard_id].progress()
            arena = self._forget(shard_id, machine)
            _rename(arena, SOURCE_SUFFIX)
            spent = _without(keep, slots := _slots(arena))
            for number in spent:
                slots[number] = SlotHeader()
                arena.write_slot(number, SlotHeader())
            self._enter_source(arena, machine, same_layout=same_layout)
            left.append((arena, spent))
            reach("reshape.source")
        return left

    def give_way(self, machine: NodeMachine) -> list[Arena]:
        """Forget all arenas that are not sources: they hold nothing that is needed; to be freed."""
        self._reached |= self.progress()
        return [self._forget(shard_id, machine) for shard_id in list(self.arenas)]

    def check_room(self, keep: Collection[SnapshotId], room: int) -> None:
        """ArenaMemoryError unless ``room`` bytes could be had once all arenas are set aside."""
        given = 0
        for arena in self.arenas.values():
            slots = _slots(arena)
            spent = len(slots) if self.sources else len(_without(keep, slots))
            given += max(0, spent * arena.geometry.slot_span - arena.holes)
        text = "larger arenas for a state that has grown, in addition to its newest snapshot"
        check_memory(self.directory, max(0, room - given), text)

    def return_sources(self, restore: SnapshotId | None, machine: NodeMachine) -> list[Arena]:
        """Make all sources arenas again; those of the other layout, which are to be freed.

        These are the ones that hold nothing of ``restore``, a snapshot of the sources.
        """
        others = [
            shard_id
            for shard_id, shard in machine.shards.items()
            if shard_id in self.sources or all(slot.snapshot != restore for slot in shard.slots)
        ]
        gone = [self._forget(shard_id, machine) for shard_id in others]
        for arena in gone:
            # Its name may be that of a source in a moment.
            arena.path = files.set_aside(arena.path)
        for arena in self.drop_sources(machine):
            _rename(arena, SUFFIX)
            self.enter(arena, machine)
        return gone

    def reserve(self) -> None:
        """Have all arenas take back the memory that they gave as sources."""
        for arena in list(self.arenas.values()):
            arena.reserve()

    def note_memory(self, machine: NodeMachine) -> None:
        """Permit snapshots in all slots of arenas that are complete by now."""
        for shard_id, arena in self.arenas.items():
            slots = machine.shards[shard_id]
            slots.made = slots.made if arena.holes else len(slots.slots)

    def outlives_sources(self, commit: m.Commit) -> bool:
        """True if this commit frees the sources: its snapshot is as safe as theirs.

        Without parity that is the first one that trainers have captured: until then the job's notes
        may name the sources alone.
        """
        parity = any(header.parity_members for header in self._headers.values())
        captured = commit.snapshot.sequence > 0
        return bool(self.sources) and (commit.level == "protected" or (captured and not parity))

    def drop_sources(self, machine: NodeMachine) -> list[Arena]:
        """Forget all sources; they are to be freed."""
        gone, self.sources = list(self.sources.values()), {}
        machine.sources.clear()
        return gone

    def _enter_source(
        self, arena: Arena, machine: NodeMachine, *, same_layout: bool = False
    ) -> None:
        shard_id, slots = arena.header.shard_id, tuple(_slots(arena))
        self.sources[shard_id] = arena
        machine.sources[shard_id] = SourceArena(str(arena.path), slots, same_layout)

    def source_reports(self) -> tuple[m.ArenaReport, ...]:
        """The sources whose files are still in place, for an inventory."""
        whole = [arena for arena in self.sources.values() if arena.in_place()]
        return tuple(_report(arena.header, _slots(arena)) for arena in whole)

    def give_up(self, machine: NodeMachine) -> list[Arena]:
        """Forget every arena: the job has ended; they are to be freed."""
        gone, self.arenas = [*self.arenas.values(), *self.drop_sources(machine)], {}
        self._headers.clear()
        return gone

    def forget_damaged(self) -> list[Path]:
        """Forget what was damaged or set aside; these files are to be freed.

        The decision what to restore was made without them.
        """
        paths = [self.directory / name for name in self.damaged]
        paths += self.directory.glob(f"*{SUFFIX}{files.ASIDE}*")
        self.damaged.clear()
        return paths

    def _forget(self, shard_id: str, machine: NodeMachine) -> Arena:
        del machine.shards[shard_id], machine.paths[shard_id]
        del self._headers[shard_id]
        return self.arenas.pop(shard_id)

    def apply(self, effect: StoreSlot | StorePermit) -> None:
        arena = self.arenas[effect.shard_id]
        if isinstance(effect, StorePermit):
            self._permits[effect.shard_id] = effect.permit
            arena.write_permit(effect.permit)
            if effect.permit is not None and not effect.permit.revoked:
                reach("smp.granted")
            return
        before, after = _POINTS.get(effect.header.state, ("", ""))
        if before:
            reach(before)
        arena.write_slot(effect.slot, effect.header)
        if after:
            reach(after)

    def mend(self, machine: NodeMachine) -> None:
        """Write again what is not in memory as it was given: permits, and damaged headers.

        A trainer that does not find its permit passes its iteration in silence, and the job waits
        for the capture.  An encoder that is started next could not open an arena without header.
        All that ``machine`` has decided must be stored.
        """
        for shard_id, arena in self.arenas.items():
            slots = machine.shards[shard_id].slots
            if arena.in_place() and (mended := arena.mend_records(self._headers[shard_id], slots)):
                log.warning("%s was damaged and is mended: %s", arena.path, ", ".join(mended))
            permit = self._permits.get(shard_id)
            if shard_id in self._permits and arena.permit() != permit:
                log.warning("the permit in %s was damaged and is mended", arena.path)
                arena.write_permit(permit)

    def set_lineage(self, incarnation: int, lineage: tuple[Ancestor, ...]) -> None:
        """Record the current incarnation of the job in every arena."""
        for shard_id, arena in self.arenas.items():
            known = self._headers[shard_id]
            header = replace(known, incarnation=incarnation, lineage=lineage)
            arena.write_header(header)
            self._headers[shard_id] = header

    def progress(self) -> dict[str, int]:
        """Last iteration that each shard's trainer has finished, -1 if none."""
        return {shard_id: arena.progress() for shard_id, arena in self.arenas.items()}

    def forget_progress(self) -> None:
        """No trainer of the new incarnation has finished an iteration yet; the old are dead."""
        for arena in self.arenas.values():
            arena.write_progress(-1)

    def reports(self, machine: NodeMachine) -> tuple[m.ArenaReport, ...]:
        return tuple(
            _report(header, machine.shards[shard_id].slots)
            for shard_id, header in self._headers.items()
        )

    def _header(self, request: m.CreateArena) -> ArenaHeader:
        given = {name: getattr(request, name) for name in _GIVEN}
        try:
            parity_bytes = request.parity_members * request.data_bytes // request.data_members
            geometry = Geometry(
                request.slot_count, request.data_bytes, parity_bytes, request.block_bytes
            )
            return ArenaHeader(job=self.job, geometry=geometry, **given)
        except (ValueError, KeyError, ZeroDivisionError) as error:
            raise ControlPlaneError(f"no arena can be made as {request}: {error}") from error


def free(arenas: Iterable[Arena], paths: Iterable[Path]) -> None:
    """Delete arenas and files that no store knows; slow, safe to call from another thread."""
    for path in paths:
        files.remove(path)
    for arena in arenas:
        arena.close()
        arena.path.unlink(missing_ok=True)


def release(arena: Arena, slots: Iterable[int]) -> None:
    """Give back the memory of these slots, which are FREE; slow, as ``free``."""
    for slot in slots:
        arena.release(slot)


def _without(keep: Collection[SnapshotId], slots: Sequence[SlotHeader]) -> list[int]:
    return [number for number, slot in enumerate(slots) if slot.snapshot not in keep]


def _rename(arena: Arena, suffix: str) -> None:
    """Give an arena's file the name with this ending, in place of what has it."""
    arena.path = arena.path.replace(arena.path.with_suffix(suffix))


def _slots(arena: Arena) -> list[SlotHeader]:
    return [arena.slot(index) for index in range(arena.geometry.slot_count)]


def _check_same(present: ArenaHeader, wanted: ArenaHeader) -> None:
    for field in ("codec", "data_members", "parity_members", "member_index", "members"):
        if getattr(present, field) != getattr(wanted, field):
            raise LayoutMismatchError(
                f"the arena of {present.shard_id} has {field} {getattr(present, field)}, the job "
                f"now wants {getattr(wanted, field)}; run with the old protection and parallel "
                "shape, or under another --job name"
            )
    if present.geometry.data_bytes < wanted.geometry.data_bytes:
        raise LayoutMismatchError(
            f"the arena of {present.shard_id} has room for {present.geometry.data_bytes} bytes, "
            f"the job now needs {wanted.geometry.data_bytes}: has the model changed since the "
            "snapshot? Run with the old flags, or under another --job name"
        )


def _report(header: ArenaHeader, slots: Sequence[SlotHeader]) -> m.ArenaReport:
    return m.ArenaReport(
        **{name: getattr(header, name) for name in _REPORTED},
        data_bytes=header.geometry.data_bytes,
        file_bytes=header.geometry.file_bytes,
        block_bytes=header.geometry.block_bytes,
        slots=tuple(slots),
    )


_GIVEN = {f.name for f in fields(ArenaHeader)} & set(m.CreateArena.__struct_fields__)
_REPORTED = {f.name for f in fields(ArenaHeader)} & set(m.ArenaReport.__struct_fields__)
