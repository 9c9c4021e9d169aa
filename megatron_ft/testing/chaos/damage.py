"""Damage to one arena of a job that runs: what memory, or somebody with a shell, may do."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.testing.bit_flips import regions as r

REGIONS = {
    "flip-data": r.DATA,
    "flip-parity": r.PARITY,
    "flip-digest": r.TABLE,
    "flip-header": r.SLOT_HEADER,
}


def damage(path: Path, fault: str, chance: random.Random) -> str:
    """Do it; what was done, in words."""
    if fault == "missing":
        path.unlink()
        return f"{path.name} removed"
    if fault == "truncate":
        size = path.stat().st_size
        os.truncate(path, size // 2)
        return f"{path.name} cut from {size} to {size // 2} bytes"
    return _flip(path, REGIONS[fault], chance)


def _flip(path: Path, region: str, chance: random.Random) -> str:
    with Arena.open(path) as arena:
        slot = _newest(arena)
        record = arena.slot(slot).record
        assert record is not None
        found = [x for x in r.regions(arena.geometry, record, slot) if x.name == region]
        place = found[0]
        at, bit = chance.randrange(place.start, place.stop), chance.randrange(8)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[at] ^= 1 << bit
    return f"bit {bit} of byte {at} of {path.name} flipped: {region} of slot {slot}"


def _newest(arena: Arena) -> int:
    """The slot of the newest snapshot that is committed here."""
    slots = {number: arena.slot(number) for number in range(arena.geometry.slot_count)}
    held = {n: s.snapshot for n, s in slots.items() if s.state == SlotState.COMMITTED}
    return max(held, key=lambda number: held[number] or (0, 0))
