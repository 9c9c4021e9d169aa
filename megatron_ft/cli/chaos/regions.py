"""Which bytes of an arena are flipped, by what they are.  Unused bytes between regions are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.arena import binary
from megatron_ft.arena import format as fmt
from megatron_ft.arena.binary import ENVELOPE_BYTES
from megatron_ft.arena.format import Geometry
from megatron_ft.core.identity import SealedRecord

DATA, TABLE, PADDING = "data", "digest table", "padding"
PARITY, PARITY_DIGESTS = "parity", "digests of parity"
ARENA_HEADER, SLOT_HEADER = "arena header", "slot header"
PERMIT, PROGRESS, PREAMBLE = "permit", "progress", "magic and version"

IN_BLOCKS = (DATA, TABLE, PADDING, PARITY, PARITY_DIGESTS)
"""Regions that parity repairs, block by block."""


@dataclass(frozen=True)
class Region:
    """Bytes [start, stop) of an arena file; ``copy`` is 0 or 1 for what is stored twice."""

    name: str
    start: int
    stop: int
    copy: int = 0


def regions(geometry: Geometry, record: SealedRecord, slot: int) -> Iterator[Region]:
    """Every region of an arena whose ``slot`` holds the sealed record."""
    yield Region(PREAMBLE, 0, binary.PREAMBLE_BYTES)
    for name, start, copy_bytes, payload in (
        (ARENA_HEADER, fmt.HEADER_OFFSET, fmt.HEADER_COPY_BYTES, binary.HEADER_BYTES),
        (PERMIT, fmt.PERMIT_OFFSET, fmt.WORD_COPY_BYTES, binary.PERMIT_BYTES),
        (PROGRESS, fmt.PROGRESS_OFFSET, fmt.WORD_COPY_BYTES, binary.PROGRESS_BYTES),
        (
            SLOT_HEADER,
            geometry.slot_header_offset(slot),
            fmt.SLOT_COPY_BYTES,
            binary.SLOT_BYTES,
        ),
    ):
        for copy in (0, 1):
            at = start + copy * copy_bytes
            yield Region(name, at, at + ENVELOPE_BYTES + payload, copy)
    base, parity = geometry.data_offset(slot), geometry.parity_offset(slot)
    digests = geometry.parity_digest_offset(slot)
    yield Region(DATA, base, base + record.digest_offset)
    yield Region(TABLE, base + record.digest_offset, base + record.used_bytes)
    yield Region(PADDING, base + record.used_bytes, base + geometry.data_bytes)
    yield Region(PARITY, parity, parity + geometry.parity_bytes)
    yield Region(PARITY_DIGESTS, digests, digests + 8 * geometry.parity_blocks)
