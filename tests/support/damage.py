"""Damage to one arena of a job that runs: what memory, or somebody with a shell, may do."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.arena import binary
from megatron_ft.arena import format as fmt
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.binary import ENVELOPE_BYTES
from megatron_ft.arena.format import SlotState
from megatron_ft.core.identity import SealedRecord

DATA, TABLE, PADDING = "data", "digest table", "padding"
PARITY, PARITY_DIGESTS = "parity", "digests of parity"
ARENA_HEADER, SLOT_HEADER = "arena header", "slot header"
PERMIT, PROGRESS, PREAMBLE = "permit", "progress", "magic and version"

IN_BLOCKS = (DATA, TABLE, PARITY, PARITY_DIGESTS)
"""Regions that have digests, block by block."""


@dataclass(frozen=True)
class Region:
    """Bytes [start, stop) of an arena file; ``copy`` is 0 or 1 for what is stored twice."""

    name: str
    start: int
    stop: int
    copy: int = 0


def regions(arena: Arena, record: SealedRecord, slot: int) -> Iterator[Region]:
    """Every region of an arena whose ``slot`` holds the sealed record; gaps are in none."""
    geometry = arena.geometry
    yield Region(PREAMBLE, 0, binary.PREAMBLE_BYTES)
    slot_header, progress = geometry.slot_header_offset(slot), arena.progress()
    for name, start, copy_bytes, payload in (
        (ARENA_HEADER, fmt.HEADER_OFFSET, fmt.HEADER_COPY_BYTES, binary.pack_header(arena.header)),
        (PERMIT, fmt.PERMIT_OFFSET, fmt.WORD_COPY_BYTES, binary.pack(arena.permit())),
        (
            PROGRESS,
            fmt.PROGRESS_OFFSET,
            fmt.WORD_COPY_BYTES,
            binary.pack(progress),
        ),
        (SLOT_HEADER, slot_header, fmt.SLOT_COPY_BYTES, binary.pack(arena.slot(slot))),
    ):
        for copy in (0, 1):
            at = start + copy * copy_bytes
            yield Region(name, at, at + ENVELOPE_BYTES + len(payload), copy)
    base, parity = geometry.data_offset(slot), geometry.parity_offset(slot)
    digests = geometry.parity_digest_offset(slot)
    yield Region(DATA, base, base + record.digest_offset)
    yield Region(TABLE, base + record.digest_offset, base + record.used_bytes)
    yield Region(PADDING, base + record.used_bytes, base + geometry.data_bytes)
    yield Region(PARITY, parity, parity + geometry.parity_bytes)
    yield Region(PARITY_DIGESTS, digests, digests + 8 * geometry.parity_blocks)


FAULTS = (
    *("flip-data", "flip-parity", "flip-digest", "flip-padding", "flip-header", "padding"),
    *("arena-header", "slot-header", "magic", "truncate", "extend", "mode", "folder", "link"),
    "missing",
)
"""Every damage that ``damage`` does."""

_FLIPPED = {
    "flip-data": DATA,
    "flip-parity": PARITY,
    "flip-digest": TABLE,
    "flip-padding": PADDING,
    "flip-header": SLOT_HEADER,
    "magic": PREAMBLE,
}
_OVERWRITTEN = {"slot-header": SLOT_HEADER, "arena-header": ARENA_HEADER, PADDING: PADDING}
_PAGE = 4096


def arenas(folder: Path) -> list[Path]:
    """The arenas of a node, in the order of their names."""
    return sorted(folder.glob("*.arena"))


def damage(path: Path, fault: str, chance: random.Random) -> str:
    """Damage an arena and return what was done.  ValueError if no snapshot is committed there."""
    if fault not in _WHOLE_FILE:
        return _change_bytes(path, fault, chance)
    _WHOLE_FILE[fault](path)
    return f"{fault} of {path.name}"


def put_back(path: Path, older: bytes) -> str:
    """Write an older copy of the arena in its place."""
    with path.open("r+b") as file:
        file.write(older)
    return f"an older copy of {path.name} written in place"


def _change_bytes(path: Path, fault: str, chance: random.Random) -> str:
    """Flip a bit of one region, or overwrite all copies of a header."""
    name = _OVERWRITTEN.get(fault) or _FLIPPED[fault]
    with Arena.open(path) as arena:
        slot = _newest(arena)
        every = range(arena.geometry.slot_count) if fault == PADDING else [slot]
        records = {number: arena.slot(number).record for number in every}
        if records[slot] is None:
            raise ValueError(f"slot {slot} of {path} was just given up")
        found = [
            region
            for number, record in records.items()
            if record is not None
            for region in regions(arena, record, number)
            if region.name == name
        ]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        if fault in _OVERWRITTEN:
            for place in found:
                memory[place.start : place.stop] = chance.randbytes(place.stop - place.start)
            return f"all of the {name} of {path.name} overwritten (slots {sorted(records)})"
        at, bit = chance.randrange(found[0].start, found[0].stop), chance.randrange(8)
        memory[at] ^= 1 << bit
    return f"bit {bit} of byte {at} of {path.name} flipped: {name} of slot {slot}"


def _newest(arena: Arena) -> int:
    """The slot of the newest snapshot that is committed here."""
    slots = {number: arena.slot(number) for number in range(arena.geometry.slot_count)}
    held = {n: s.snapshot for n, s in slots.items() if s.state == SlotState.COMMITTED}
    return max(held, key=lambda number: held[number] or (0, 0))


def overwrite(path: Path, at: int, length: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * length)


def arena_header(path: Path) -> None:
    overwrite(path, fmt.HEADER_OFFSET, 2 * fmt.HEADER_COPY_BYTES)


def slot_headers(path: Path) -> None:
    with Arena.open(path) as arena:
        at = arena.geometry.slot_header_offset(0)
    overwrite(path, at, arena.geometry.control_bytes - at)


def magic(path: Path) -> None:
    overwrite(path, 3, 1)


def extended(path: Path) -> None:
    os.truncate(path, path.stat().st_size + _PAGE)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def closed(path: Path) -> None:
    path.chmod(0o000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def link(path: Path) -> None:
    moved = path.with_name(f"{path.name}.moved")
    path.rename(moved)
    path.symlink_to(moved.name)


def second_name(path: Path) -> None:
    os.link(path, path.with_name("second"))


_WHOLE_FILE: Mapping[str, Callable[[Path], None]] = {
    "truncate": cut,
    "extend": extended,
    "mode": open_to_others,
    "folder": folder,
    "link": link,
    "missing": Path.unlink,
}


def damaged_records(arena: Arena) -> list[str]:
    """Names of the headers of which a copy is not whole."""
    return [name for name, place in arena._headers() if arena._is_damaged(place)]
