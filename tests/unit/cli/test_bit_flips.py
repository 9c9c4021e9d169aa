"""Random bits of real arenas are flipped; each is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.arena import binary
from megatron_ft.core.errors import ArenaCorruptError
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from tests.support import damage as regions
from tests.support.bit_flips import flip, table

EVERY_REGION = {
    value for name, value in vars(regions).items() if name.isupper() and isinstance(value, str)
}


@pytest.mark.parametrize(("scheme", "flips"), [("rs:2+2", 2500), ("xor:3", 1000)])
def test_every_flipped_bit_is_found(scheme: str, flips: int, tmp_path: Path) -> None:
    """A million of them: python -m tests.support.bit_flips."""
    counts = flip(scheme, flips, seed=7, folder=tmp_path)
    assert counts.keys() == EVERY_REGION
    assert sum(sum(count.values()) for count in counts.values()) >= flips
    for name, count in counts.items():
        kinds = {"found"} if name in regions.IN_BLOCKS else {"mended", "refused"}
        kinds = {regions.PADDING: {"ignored"}, regions.PREAMBLE: {"refused"}}.get(name, kinds)
        assert count.keys() == kinds, (name, count)


def test_a_scrub_that_finds_nothing_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SlotInspector, "damage", lambda *_: Damage())
    counts = flip("xor:3", 300, seed=1, folder=tmp_path)
    for name in regions.IN_BLOCKS:
        assert counts[name].keys() == {"missed"}, name


def test_headers_without_a_commit_word_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def parse(raw: bytes, place: binary.RecordPlace) -> tuple[int, bytes] | None:
        version = int.from_bytes(raw[:8], "little")
        end = binary.ENVELOPE_BYTES + int.from_bytes(raw[16:20], "little")
        payload = raw[binary.ENVELOPE_BYTES : end]
        try:
            unpack[place.kind](payload)
        except ArenaCorruptError:
            return None
        return (version, payload) if version < binary.MAX_VERSION else None

    unpack = {
        binary.KIND_HEADER: binary.unpack_header,
        binary.KIND_SLOT: binary.unpack_slot,
        binary.KIND_PERMIT: binary.unpack_permit,
        binary.KIND_PROGRESS: binary.unpack_progress,
    }

    monkeypatch.setattr(binary, "parse_copy", parse)
    counts = flip("xor:3", 300, seed=1, folder=tmp_path)
    assert counts[regions.SLOT_HEADER]["missed"] > 0


def test_the_table_adds_up(tmp_path: Path) -> None:
    counts = flip("xor:3", 50, 1, tmp_path)
    lines = table(counts).splitlines()
    total = sum(sum(count.values()) for count in counts.values())
    assert lines[-1].startswith(f"| all | {total} |") and lines[-1].endswith("| 0 |")
