"""Arena files of any content: an ArenaError or a correct reading, nothing else, no crash."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.arena import binary, digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Geometry, Permit, SlotHeader
from megatron_ft.core.errors import ArenaError, ArenaForeignError
from megatron_ft.core.identity import SnapshotId
from tests.support.arena_samples import make_header, make_slot

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))

# A crash would end pytest itself: that this file's tests finish is part of what they show.

PERMIT = Permit(SnapshotId(7, 92), 1240, 1)
EXPECTED = (make_header(), SlotHeader(), make_slot(), PERMIT, 1239)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("arena") / "a.arena"
    with Arena.create(path, make_header()) as arena:
        arena.write_slot(1, make_slot())
        arena.write_permit(PERMIT)
        arena.write_progress(1239)
    return path.read_bytes()


@pytest.fixture(scope="module")
def target() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arena-test-", dir="/dev/shm") as name:
        path = Path(name, "a.arena")
        path.touch(mode=0o600)
        yield path


def outcomes(path: Path) -> list[object]:
    """What each reading of the arena gives; an ArenaError counts as an outcome."""
    try:
        arena = Arena.open(path)
    except ArenaError as error:
        return [error] * len(EXPECTED)
    with arena:
        touch_everything(arena)
        readings = [
            lambda: arena.header,
            lambda: arena.slot(0),
            lambda: arena.slot(1),
            arena.permit,
            arena.progress,
        ]
        return [outcome(reading) for reading in readings]


def outcome(reading) -> object:
    try:
        return reading()
    except ArenaError as error:
        return error


def touch_everything(arena: Arena) -> None:
    for slot in range(arena.geometry.slot_count):
        for view in (arena.data(slot), arena.parity(slot), arena.parity_digests(slot)):
            view.any()
        header = outcome(lambda slot=slot: arena.slot(slot))
        if isinstance(header, SlotHeader) and header.record is not None:
            assert digest.verify_shard(arena.data(slot), header.record, 1024)
            outcome(lambda slot=slot, h=header: digest.read_meta(arena.data(slot), h.record))


def is_acceptable(found: list[object]) -> bool:
    absent = [None, None, None, None, -1]
    return all(
        got == wanted or isinstance(got, ArenaError) or (index >= 3 and got == absent[index])
        for index, (got, wanted) in enumerate(zip(found, EXPECTED, strict=True))
    )


places = st.integers(0, 16) | st.integers(4096, 4400) | st.integers(0, 98304 + 49152 - 1)
flips = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=8)
lengths = st.none() | st.integers(0, 100) | st.integers(0, 98304 + 49152 + 5000)


@settings(
    max_examples=3 * EXAMPLES // 2, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
@given(flips=flips, length=lengths)
def test_flipped_and_cut_files(valid: bytes, target: Path, flips, length: int | None) -> None:
    raw = bytearray(valid)
    for at, mask in flips:
        raw[at % len(raw)] ^= mask
    target.write_bytes(raw[:length])
    if length is not None and length > len(raw):
        os.truncate(target, length)
    assert is_acceptable(outcomes(target))


@settings(max_examples=3 * EXAMPLES // 5, deadline=None)
@given(at=st.integers(0, 98304 - 1), mask=st.integers(1, 255))
def test_one_damaged_byte_of_the_records_costs_nothing(
    valid: bytes, target: Path, at: int, mask: int
) -> None:
    raw = bytearray(valid)
    raw[at] ^= mask
    target.write_bytes(raw)
    if at >= 16:
        assert outcomes(target) == list(EXPECTED)
    else:
        assert all(isinstance(found, ArenaError) for found in outcomes(target))


def forged(valid: bytes, payload: bytes) -> bytes:
    """The arena with a newer header, whose commit word is right."""
    tag = struct.pack("<QIII", 1000, binary.KIND_HEADER, 0, len(payload))
    copy = tag + binary._commit_word(tag, payload) + payload
    return valid[:4096] + copy + valid[4096 + len(copy) :]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 160), st.binary(min_size=1, max_size=8)), min_size=1),
    sizes=st.none() | st.tuples(*[st.integers(0, 1 << 64 - 1) | st.integers(0, 9)] * 4),
)
def test_headers_forged_with_a_right_hash(valid: bytes, target: Path, edits, sizes) -> None:
    """Any values under a matching commit word, as a hostile owner of the file could make."""
    payload = bytearray(binary.pack_header(make_header()))
    for at, new in edits:
        payload[at : at + len(new)] = new
    if sizes is not None:
        fields = ("slot_count", "data_bytes", "parity_bytes", "block_bytes")
        geometry = dict(zip(fields, (size % (1 << 64) for size in sizes), strict=True))
        plain = msgspec.to_builtins(make_header()) | {"geometry": geometry}
        payload = bytearray(msgspec.msgpack.encode(plain))
    target.write_bytes(forged(valid, bytes(payload)))
    for found in outcomes(target):
        assert not isinstance(found, ArenaForeignError)


def test_a_forged_length_that_the_machine_cannot_hold(valid: bytes, target: Path) -> None:
    """A sparse file as long as its header says: an error, not an attempt to fill it."""
    sizes = Geometry(2, 1 << 43, 1 << 42, 1 << 20)
    payload = binary.pack_header(make_header(geometry=sizes))
    target.write_bytes(forged(valid, payload))
    os.truncate(target, sizes.file_bytes)
    with pytest.raises(ArenaError, match="holes") as caught:
        Arena.open(target)
    assert "No space left" not in str(caught.value), "it was tried"
