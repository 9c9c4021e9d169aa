"""An arena file, created or adopted, and views of its regions.

Creating an arena allocates and populates its memory, within all limits.  Opening one
checks that it is whole and belongs to the caller.  Data, parity and records are mapped
separately, and writable only where the caller asks for it.  A stray write by a process
that only reads (an encoder) then faults instead of corrupting.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import binary, files, limits
from megatron_ft.arena import format as fmt
from megatron_ft.arena.binary import RecordPlace
from megatron_ft.arena.format import ArenaHeader, Geometry, Permit, SlotHeader, SlotState
from megatron_ft.arena.mapping import Mapping, huge_page_bytes
from megatron_ft.arena.mapping import allocate as allocate_huge
from megatron_ft.core.errors import ArenaCorruptError, ArenaForeignError, ArenaMemoryError

log = logging.getLogger(__name__)

NO_PROGRESS = -1

_PIECE_BYTES = 32 << 20
"""Bytes that ``complete`` allocates at a time."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

_PERMIT_PLACE = RecordPlace(fmt.PERMIT_OFFSET, fmt.WORD_COPY_BYTES, binary.KIND_PERMIT)
_PROGRESS_PLACE = RecordPlace(fmt.PROGRESS_OFFSET, fmt.WORD_COPY_BYTES, binary.KIND_PROGRESS)


class Arena:
    """One mapped arena file; made by ``create`` or ``open``, closed by ``close`` or ``with``.

    Writers, one each: the SMP writes header, slot headers and permit, the trainer
    progress and the granted slot's data, the encoder parity.  Readers may be anywhere.

    ``close`` never pulls memory from under a view: what is still viewed stays mapped
    until its last view dies.  A closed arena's methods raise ValueError.
    """

    def __init__(self, path: Path, fd: int, geometry: Geometry) -> None:
        self.path = path
        self._geometry = geometry
        self._lock = threading.Lock()
        self._writable: dict[int, Mapping] = {}
        self._all: Mapping | None = Mapping(
            fd, 0, geometry.file_bytes, writable=False, name=str(path)
        )
        # Our own descriptor: mappings are added later, and an unlinked file lives on with it.
        self._fd = os.dup(fd)
        # An interruption may drop an arena that nobody has closed.
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._close_fd.atexit = False

    @classmethod
    def create(
        cls,
        path: Path,
        header: ArenaHeader,
        *,
        replace: bool = False,
        first_slot: bool = False,
        owed: int = 0,
    ) -> Arena:
        """Allocate, populate and publish a new arena: all slots free, no permit, no progress.

        The parent folder is made with mode 0700 if missing.  Another process sees the
        complete file or none.  ArenaMemoryError if a limit is in the way, with nothing left
        behind.  An arena that exists is refused with ArenaError unless ``replace``,
        since it may hold the only copy of a snapshot.

        With ``first_slot`` the other slots get their memory by ``complete``, and the limits must
        leave room for them, as for ``owed`` bytes of other arenas.
        """
        sizes = header.geometry
        arithmetic = limits.describe_requirement(sizes, header.parity_members, header.data_members)
        first = _first_bytes(sizes) if first_slot else sizes.file_bytes
        arena: Arena | None = None
        try:
            with files.new_file(
                path, sizes.file_bytes, arithmetic, replace=replace, first=first, owed=owed
            ) as fd:
                arena = cls(path, fd, sizes)
                arena._fill(header, first)
        except BaseException:
            if arena is not None:
                arena.close()
            raise
        return arena

    @classmethod
    def open(cls, path: Path, *, job: UUID | None = None) -> Arena:
        """Map an arena that exists, after checking all that can be wrong with it.

        ArenaForeignError: a link, no plain file, another user's, or not of ``job``.
        ArenaVersionError: another format version or byte order.  ArenaTruncatedError:
        shorter than its header says.  ArenaCorruptError: no arena, or both copies of its
        header damaged.  ArenaError: it does not exist.
        """
        fd = files.open_file(path)
        try:
            header = files.read_header(fd, path)
            if job is not None and header.job != job:
                raise ArenaForeignError(
                    f"{path} belongs to job {header.job}, not to {job}: remove it if that job is "
                    "over, or give this job another directory"
                )
            files.check_length(fd, path, header.geometry.file_bytes)
            arena = cls(path, fd, header.geometry)
        finally:
            os.close(fd)
        try:
            arena._fill_holes()
        except BaseException:
            arena.close()
            raise
        return arena

    def _fill_holes(self) -> None:
        """Allocate memory behind all headers, and behind the slots that are not FREE."""
        sizes = self._geometry
        missing = files.holes(self._fd, sizes.file_bytes)
        if not missing:
            return
        used = [(0, sizes.control_bytes)]
        files.fill_holes(self._fd, self.path, used, 0)
        for slot in range(sizes.slot_count):
            place = self._slot_place(slot)
            raw = binary.read_settled(partial(self._copies, place), place)
            if raw is None or binary.unpack_slot(raw).state != SlotState.FREE:
                used.append((sizes.data_offset(slot), sizes.slot_span))
        free = sizes.slot_count + 1 - len(used)
        files.fill_holes(self._fd, self.path, used, missing - free * sizes.slot_span)

    def _fill(self, header: ArenaHeader, first: int) -> None:
        whole = Mapping(self._fd, 0, first, writable=True, name=str(self.path))
        whole.populate()
        whole.write(0, binary.pack_preamble())
        whole.close()
        self._write(files.HEADER_PLACE, binary.pack_header(header))
        for slot in range(self._geometry.slot_count):
            self.write_slot(slot, SlotHeader())

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def header(self) -> ArenaHeader:
        """The arena header as it is in memory now; ArenaCorruptError if no copy is whole."""
        header = binary.unpack_header(self._read_required(files.HEADER_PLACE, "arena header"))
        if header.geometry != self._geometry:
            raise ArenaCorruptError(f"{self.path} changed its geometry while it was open")
        return header

    def write_header(self, header: ArenaHeader) -> None:
        """Replace the arena header; job, shard and geometry cannot change (ValueError)."""
        raw = self._read(files.HEADER_PLACE)
        present = header if raw is None else binary.unpack_header(raw)
        if header.geometry != self._geometry or (header.job, header.shard_id) != (
            present.job,
            present.shard_id,
        ):
            raise ValueError(
                f"job, shard and geometry of {self.path} cannot change: make a new arena"
            )
        self._write(files.HEADER_PLACE, binary.pack_header(header))

    def slot(self, slot: int) -> SlotHeader:
        """One slot's header as it is in memory now; ArenaCorruptError if no copy is whole."""
        return binary.unpack_slot(self._read_required(self._slot_place(slot), f"slot {slot}"))

    def write_slot(self, slot: int, header: SlotHeader) -> None:
        self._write(self._slot_place(slot), binary.pack(header))

    def mend_records(
        self, header: ArenaHeader, slots: Sequence[SlotHeader], *, stale: bool = False
    ) -> list[str]:
        """Write damaged headers anew, these values being what they were; returns their names.

        Even with both copies damaged nothing is lost as long as their writer remembers.  With
        ``stale`` headers that are whole but say something else are written anew as well.  The
        file's first bytes and its mode are put right, too.
        """
        payloads = [binary.pack_header(header), *(binary.pack(slot) for slot in slots)]
        damaged = []
        if self._everything().read(0, binary.PREAMBLE_BYTES) != binary.pack_preamble():
            control = self._writable_mapping(0, self._geometry.control_bytes)
            control.write(0, binary.pack_preamble())
            damaged.append("first bytes")
        if stat.S_IMODE(os.fstat(self._fd).st_mode) != files.MODE:
            os.fchmod(self._fd, files.MODE)
            damaged.append("mode")
        for (name, place), payload in zip(self._headers(), payloads, strict=True):
            if self._is_damaged(place) or (stale and self._read(place) != payload):
                self._write(place, payload)
                damaged.append(name)
        return damaged

    def _headers(self) -> list[tuple[str, RecordPlace]]:
        slots = range(self._geometry.slot_count)
        return [
            ("arena header", files.HEADER_PLACE),
            *((f"slot {slot}", self._slot_place(slot)) for slot in slots),
        ]

    def _is_damaged(self, place: RecordPlace) -> bool:
        return any(binary.parse_copy(raw, place) is None for raw in self._copies(place))

    def permit(self) -> Permit | None:
        """The permit as it is in memory now; None if there is none or it is damaged."""
        raw = self._read(_PERMIT_PLACE)
        permit = None if raw is None else binary.unpack_permit(raw)
        damaged = permit is not None and permit.slot >= self._geometry.slot_count
        return None if damaged else permit

    def write_permit(self, permit: Permit | None) -> None:
        self._write(_PERMIT_PLACE, binary.pack(permit))

    def progress(self) -> int:
        """The last iteration that the trainer finished; -1 if none is known."""
        raw = self._read(_PROGRESS_PLACE)
        return NO_PROGRESS if raw is None else binary.unpack_progress(raw)

    def write_progress(self, iteration: int) -> None:
        self._write(_PROGRESS_PLACE, binary.pack(iteration))

    def data(self, slot: int, writable: bool = False) -> NDArray[np.uint8]:
        """The slot's data region; its address stays the same."""
        at = self._geometry.data_offset(slot)
        return self._view(np.uint8, at, self._geometry.data_bytes, writable)

    def parity(self, slot: int, writable: bool = False) -> NDArray[np.uint8]:
        at = self._geometry.parity_offset(slot)
        return self._view(np.uint8, at, self._geometry.parity_bytes, writable)

    def parity_digests(self, slot: int, writable: bool = False) -> NDArray[np.uint64]:
        """Digests of the slot's parity blocks, ``geometry.parity_blocks`` little-endian u64."""
        at = self._geometry.parity_digest_offset(slot)
        return self._view(np.uint64, at, self._geometry.parity_blocks, writable)

    def prefault(self, slot: int, start: int = 0, stop: int | None = None) -> None:
        """Map pages of the slot's writable data view now, not during the first capture.

        ``start`` and ``stop`` are byte offsets in that view.
        """
        sizes = self._geometry
        view = self._writable_mapping(sizes.data_offset(slot), sizes.data_bytes)
        view.populate(start, sizes.data_bytes if stop is None else stop)

    def release(self, slot: int) -> None:
        """Empty a slot and give its memory back; nobody may write to it before ``reserve``."""
        self.write_slot(slot, SlotHeader())
        unit, at = mmap.ALLOCATIONGRANULARITY, self._geometry.data_offset(slot)
        start, stop = fmt.round_up(at, unit), (at + self._geometry.slot_span) // unit * unit
        if start < stop:
            given = Mapping(self._fd, start, stop - start, writable=True, name=str(self.path))
            try:
                given.release()
            except OSError as error:
                # Only memory is lost by it: the arenas next to it take that much more.
                log.warning("%s keeps the memory of slot %d: %s", self.path, slot, error)
            finally:
                given.close()

    def reserve(self, *, first_slot: bool = False) -> None:
        """Allocate all slots again, or the first one; ArenaMemoryError if there is no memory."""
        sizes = self._geometry
        try:
            os.posix_fallocate(self._fd, 0, _first_bytes(sizes) if first_slot else sizes.file_bytes)
        except OSError as error:
            raise ArenaMemoryError(
                f"{self.path} had given memory back and gets none now ({error.strerror}): make "
                "room on its file system"
            ) from error

    @property
    def holes(self) -> int:
        """Bytes of slots without memory, which nobody may touch: 0 in a complete arena."""
        return files.holes(self._fd, self._geometry.file_bytes)

    def complete(self, may_continue: Callable[[], bool]) -> None:
        """Allocate memory behind every slot; ArenaMemoryError if there is not enough.

        Half of the time is left to others, and ``may_continue`` is asked before each piece.  Safe
        during ``close`` and while others write.
        """
        with self._lock:
            self._everything()
            fd = os.dup(self._fd)
        sizes, arithmetic = self._geometry, "slots behind the first one"
        start, stop = _first_bytes(sizes), sizes.file_bytes
        try:
            for at in range(start, stop, _PIECE_BYTES):
                began, length = time.monotonic(), min(_PIECE_BYTES, stop - at)
                if not may_continue():
                    return
                missing = min(stop - at, files.holes(fd, stop))
                limits.check_memory(self.path.parent, missing, arithmetic)
                allocate_huge(fd, at, at + length)
                files.allocate(fd, self.path.parent, at, length, arithmetic)
                time.sleep(time.monotonic() - began)
        finally:
            os.close(fd)

    def in_place(self) -> bool:
        """True if ``path`` still leads to this very file, and the file has its full length."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        same = os.path.samestat(found, os.fstat(self._fd))
        return same and found.st_size >= self._geometry.file_bytes

    def close(self) -> None:
        """Give up descriptor and mappings; what is still viewed is unmapped with its last view."""
        with self._lock:
            if self._all is None:
                return
            self._close_fd()
            for mapping in (self._all, *self._writable.values()):
                mapping.close()
            # Dropped, not only closed: where views live, theirs must be the last references.
            self._all = None
            self._writable.clear()

    def close_beside(self) -> threading.Thread:
        """As ``close``, in the thread that is returned: undoing a large mapping takes a while."""
        thread = threading.Thread(target=self.close, name="megatron-ft-unmap")
        thread.start()
        return thread

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _slot_place(self, slot: int) -> RecordPlace:
        at = self._geometry.slot_header_offset(slot)
        return RecordPlace(at, fmt.SLOT_COPY_BYTES, binary.KIND_SLOT, slot)

    def _view(self, dtype: type[_Scalar], at: int, count: int, writable: bool) -> NDArray[_Scalar]:
        everything = self._everything()
        if count == 0:
            return np.empty(0, dtype)
        if not writable:
            return everything.view(dtype, at, count)
        length = count * np.dtype(dtype).itemsize
        return self._writable_mapping(at, length).view(dtype, 0, count)

    def _everything(self) -> Mapping:
        mapping = self._all
        if mapping is None:
            raise ValueError(f"the arena {self.path} is closed")
        return mapping

    def _writable_mapping(self, at: int, length: int) -> Mapping:
        with self._lock:
            self._everything()
            if at not in self._writable:
                self._writable[at] = Mapping(
                    self._fd, at, length, writable=True, name=str(self.path)
                )
            return self._writable[at]

    def _copies(self, place: RecordPlace) -> binary.Copies:
        mapping = self._everything()
        first = mapping.read(place.offset, place.copy_bytes)
        return first, mapping.read(place.offset + place.copy_bytes, place.copy_bytes)

    def _read(self, place: RecordPlace) -> bytes | None:
        return binary.read_settled(lambda: self._copies(place), place)

    def _read_required(self, place: RecordPlace, what: str) -> bytes:
        raw = self._read(place)
        if raw is None:
            raise ArenaCorruptError(files.both_damaged(self.path, what))
        return raw

    def _write(self, place: RecordPlace, payload: bytes) -> None:
        mapping = self._writable_mapping(0, self._geometry.control_bytes)
        for store in binary.plan_write(self._copies(place), place, payload):
            mapping.write(store.offset, store.raw)


def _first_bytes(sizes: Geometry) -> int:
    """The part of the file that holds the first slot, to the end of its last huge page."""
    end = fmt.round_up(sizes.control_bytes + sizes.slot_span, huge_page_bytes())
    return min(end, sizes.file_bytes)
