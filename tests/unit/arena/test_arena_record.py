"""Stored-twice records: a writer cut off anywhere, a reader beside a writer."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena import binary
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.binary import RecordPlace, Store
from megatron_ft.core.errors import ArenaCorruptError
from tests.support.arena_samples import make_header

PLACE = RecordPlace(offset=64, copy_bytes=128, kind=3, index=2)
PAYLOAD = 40
STORED = binary.ENVELOPE_BYTES + PAYLOAD


def copies_of(memory: bytes, place: RecordPlace = PLACE) -> binary.Copies:
    second = place.offset + place.copy_bytes
    return (
        bytes(memory[place.offset : place.offset + place.copy_bytes]),
        bytes(memory[second : second + place.copy_bytes]),
    )


def apply(memory: bytearray, stores: list[Store], limit: int | None = None) -> None:
    for store in stores:
        raw = store.raw if limit is None else store.raw[:limit]
        memory[store.offset : store.offset + len(raw)] = raw
        if limit is not None:
            limit -= len(raw)


def read(memory: bytearray) -> bytes | None:
    return binary.read_settled(lambda: copies_of(memory), PLACE)


def payload(seed: int) -> bytes:
    return random.Random(seed).randbytes(PAYLOAD - seed % 7)


def written(*seeds: int) -> bytearray:
    memory = bytearray(512)
    for seed in seeds:
        apply(memory, binary.plan_write(copies_of(memory), PLACE, payload(seed)))
    return memory


def test_what_was_never_written_is_absent() -> None:
    assert read(bytearray(512)) is None


@pytest.mark.parametrize("history", [(), (1,), (1, 2), (1, 2, 3)])
def test_a_write_cut_at_any_byte_leaves_the_old_record_or_the_new(history: tuple[int, ...]) -> None:
    before = written(*history)
    old, new = read(before), payload(99)
    stores = binary.plan_write(copies_of(before), PLACE, new)
    total = sum(len(store.raw) for store in stores)
    seen = []
    for limit in range(total + 1):
        memory = bytearray(before)
        apply(memory, stores, limit)
        seen.append(read(memory))
    torn = [limit for limit, found in enumerate(seen) if found not in (old, new)]
    assert not torn, f"cut after {torn[0]} of {total} bytes the record is neither old nor new"
    assert set(seen) == {old, new}
    changes = sum(a != b for a, b in zip(seen, seen[1:], strict=False))
    assert changes == 1, "once the new record can be read it stays"
    assert seen[0] == old and seen[-1] == new


@pytest.mark.parametrize("cut", [0, 5, 30, 56, 71, 72, 90, 130])
def test_a_write_after_one_that_was_cut_is_as_safe(cut: int) -> None:
    before = written(1, 2)
    apply(before, binary.plan_write(copies_of(before), PLACE, payload(3)), cut)
    old, new = read(before), payload(4)
    assert old in (payload(2), payload(3))
    stores = binary.plan_write(copies_of(before), PLACE, new)
    for limit in range(sum(len(store.raw) for store in stores) + 1):
        memory = bytearray(before)
        apply(memory, stores, limit)
        assert read(memory) in (old, new)


@given(st.data())
def test_stores_that_arrive_in_any_order_leave_old_or_new(data: st.DataObject) -> None:
    """Any subset of the bytes of one copy's write: what a machine without store order may leave."""
    before = written(1, 2)
    stores = binary.plan_write(copies_of(before), PLACE, payload(3))[:3]
    changes = [(s.offset + i, byte) for s in stores for i, byte in enumerate(s.raw)]
    memory = bytearray(before)
    for at, byte in data.draw(st.lists(st.sampled_from(changes), unique=True)):
        memory[at] = byte
    assert read(memory) in (payload(2), payload(3))


def test_one_damaged_byte_loses_nothing() -> None:
    intact = written(1, 2)
    for copy in range(2):
        start = PLACE.offset + copy * PLACE.copy_bytes
        for at in range(start, start + STORED - 7):
            memory = bytearray(intact)
            memory[at] ^= 0x40
            assert read(memory) == payload(2)


def test_any_damaged_byte_of_a_copy_is_seen() -> None:
    whole = copies_of(written(1))[0][: binary.ENVELOPE_BYTES + len(payload(1))]
    assert binary.parse_copy(whole, PLACE) == (1, payload(1))
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        assert binary.parse_copy(bytes(damaged), PLACE) is None


def test_a_record_of_another_kind_or_index_is_not_taken() -> None:
    memory = written(1)
    for kind, index in ((4, 2), (3, 1)):
        other = RecordPlace(PLACE.offset, PLACE.copy_bytes, kind, index)
        assert binary.newest(copies_of(memory), other) is None


def test_a_version_counter_at_its_end_is_an_error_and_not_an_overflow() -> None:
    tag = binary._TAG.pack((1 << 63) - 1, PLACE.kind, PLACE.index, len(payload(1)))
    full = tag + binary._commit_word(tag, payload(1)) + payload(1)
    with pytest.raises(ArenaCorruptError, match="version counter"):
        binary.plan_write((full, full), PLACE, payload(2))


def test_a_reader_takes_no_stale_copy_while_a_write_is_under_way() -> None:
    """First reading: copy 0 as it was long ago, copy 1 being written.  The second decides."""
    early, late = copies_of(written(1)), copies_of(written(1, 2, 3))
    torn = late[1][:60] + bytes([late[1][60] ^ 1]) + late[1][61:]
    readings = iter([(early[0], torn), late, late])
    assert binary.read_settled(lambda: next(readings), PLACE) == payload(3)


WRITER = """
import itertools, select, sys
from pathlib import Path
from megatron_ft.arena.arena import Arena
with Arena.open(Path(sys.argv[1])) as arena:
    for iteration in itertools.count():
        arena.write_progress(iteration)
        if iteration >= int(sys.argv[2]) and select.select([sys.stdin], [], [], 0)[0]:
            break
print(iteration)
"""


def test_a_reader_beside_a_writer_sees_progress_only_grow(tmp_path: Path) -> None:
    """The writer continues until the reader has met it at work, on a busy machine too."""
    path, least, deadline = tmp_path / "a.arena", 3000, time.monotonic() + 60
    command = [sys.executable, "-c", WRITER, str(path), str(least)]
    with Arena.create(path, make_header()) as arena:
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdin is not None and writer.stdout is not None
        seen, met = [arena.progress()], 0
        while writer.poll() is None and time.monotonic() < deadline:
            seen.append(arena.progress())
            met += seen[-1] != seen[-2]
            if met > 1:
                writer.stdin.close()
        writer.stdin.close()
        assert writer.wait(60) == 0
        assert arena.progress() == int(writer.stdout.read())
    assert seen == sorted(seen)
    assert met > 1, "the reader never met the writer at work"
