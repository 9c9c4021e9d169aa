"""Damage to one arena of a job that runs: what memory, or somebody with a shell, may do."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.cli.chaos import regions as r

_REGIONS = {
    "flip-data": r.DATA,
    "flip-parity": r.PARITY,
    "flip-digest": r.TABLE,
    "flip-header": r.SLOT_HEADER,
    "slot-header": r.SLOT_HEADER,
    "arena-header": r.ARENA_HEADER,
    "magic": r.PREAMBLE,
}
_OVERWRITTEN = ("slot-header", "arena-header")


_PAGE = 4096


def damage(path: Path, fault: str, chance: random.Random) -> str:
    """Do it; what was done, in words.  ValueError if no snapshot is committed there."""
    change = _WHOLE.get(fault)
    return f"{path.name} {change(path)}" if change else _bytes(path, fault, chance)


def _truncate(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"cut from {size} to {size // 2} bytes"


def _extend(path: Path) -> str:
    os.truncate(path, path.stat().st_size + _PAGE)
    return "extended by a page"


def _open_to_others(path: Path) -> str:
    path.chmod(0o644)
    return "given mode 644"


def _folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def _link(path: Path) -> str:
    moved = path.with_name(f"{path.name}.moved")
    path.rename(moved)
    path.symlink_to(moved.name)
    return "replaced by a symbolic link to it"


def _remove(path: Path) -> str:
    path.unlink()
    return "removed"


_WHOLE: Mapping[str, Callable[[Path], str]] = {
    "truncate": _truncate,
    "extend": _extend,
    "mode": _open_to_others,
    "folder": _folder,
    "link": _link,
    "missing": _remove,
}


def put_back(path: Path, older: bytes) -> str:
    """Write an older copy of the arena in its place."""
    with path.open("r+b") as file:
        file.write(older)
    return f"an older copy of {path.name} written in place"


def _bytes(path: Path, fault: str, chance: random.Random) -> str:
    """A bit of one region flips, or all copies of a header are overwritten."""
    name = _REGIONS[fault]
    with Arena.open(path) as arena:
        slot = _newest(arena)
        record = arena.slot(slot).record
        if record is None:
            raise ValueError(f"slot {slot} of {path} was just given up")
        found = [x for x in r.regions(arena.geometry, record, slot) if x.name == name]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        if fault in _OVERWRITTEN:
            for place in found:
                memory[place.start : place.stop] = chance.randbytes(place.stop - place.start)
            return f"both copies of the {name} of {path.name} overwritten (slot {slot})"
        at, bit = chance.randrange(found[0].start, found[0].stop), chance.randrange(8)
        memory[at] ^= 1 << bit
    return f"bit {bit} of byte {at} of {path.name} flipped: {name} of slot {slot}"


def _newest(arena: Arena) -> int:
    """The slot of the newest snapshot that is committed here."""
    slots = {number: arena.slot(number) for number in range(arena.geometry.slot_count)}
    held = {n: s.snapshot for n, s in slots.items() if s.state == SlotState.COMMITTED}
    return max(held, key=lambda number: held[number] or (0, 0))
