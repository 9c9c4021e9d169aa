"""The binary format: parsed by hand at the documented offsets, round trips, hostile payloads."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena import binary
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Geometry, Permit, SlotHeader, SlotState
from megatron_ft.core.errors import ArenaCorruptError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from tests.support.arena_samples import MEMBERS, SHARD, make_header, make_record, make_slot

# Every number in this test is written out from docs/reference/arena-format.md, none is imported.


def newest_copy(raw: bytes, offset: int, copy_bytes: int, kind: int, index: int) -> Any:
    """The newest whole copy, parsed by the table "A record, stored twice"."""
    found = {}
    for copy in range(2):
        at = offset + copy * copy_bytes
        version, got_kind, got_index, length, word = struct.unpack_from("<QIII16s", raw, at)
        body = raw[at + 36 : at + 36 + length]
        assert (got_kind, got_index) == (kind, index)
        assert hashlib.blake2b(raw[at : at + 20] + body, digest_size=16).digest() == word
        found[version] = body
    assert len(found) == 2, "both copies have one version"
    return msgspec.msgpack.decode(found[max(found)])


@pytest.fixture
def arena_bytes(tmp_path: Path) -> bytes:
    path = tmp_path / "a.arena"
    with Arena.create(path, make_header()) as arena:
        arena.write_slot(1, make_slot())
        arena.write_permit(Permit(SnapshotId(7, 92), 1240, 0, revoked=True))
        arena.write_progress(1239)
        arena.data(0, writable=True)[:] = 0xD0
        arena.data(1, writable=True)[:] = 0xD1
        arena.parity(0, writable=True)[:] = 0xA0
        arena.parity(1, writable=True)[:] = 0xA1
        arena.parity_digests(0, writable=True)[:] = 0xE0
        arena.parity_digests(1, writable=True)[:] = 0xE1
    return path.read_bytes()


def test_preamble_by_hand(arena_bytes: bytes) -> None:
    assert arena_bytes[0:8] == b"MFTARENA"
    assert arena_bytes[8:12] == bytes([0x0D, 0x0C, 0x0B, 0x0A])
    assert arena_bytes[12:16] == bytes([3, 0, 0, 0])


def test_header_by_hand(arena_bytes: bytes) -> None:
    assert newest_copy(arena_bytes, 4096, 8192, kind=1, index=0) == {
        "job": "00112233-4455-6677-8899-aabbccddeeff",
        "shard_id": "pp0-tp1-dp3-ep0",
        "incarnation": 7,
        "lineage": [[5, None], [7, [5, 90]]],
        "codec": "rs",
        "data_members": 2,
        "parity_members": 1,
        "member_index": 1,
        "members": ["pp0-tp1-dp2-ep0", "pp0-tp1-dp3-ep0", "pp0-tp1-dp4-ep0"],
        "geometry": {
            "slot_count": 2, "data_bytes": 12288, "parity_bytes": 6144, "block_bytes": 1024,
        },
    }  # fmt: skip


def test_slot_header_by_hand(arena_bytes: bytes) -> None:
    sizes = [1000, 1024, 50, 1088, 1104]
    values = [[7, 91], 1234, *sizes, bytes(range(32)), bytes(range(32, 64))]
    assert newest_copy(arena_bytes, 32768 + 32768, 16384, kind=2, index=1) == {
        "state": 4,
        "snapshot": [7, 91],
        "iteration": 1234,
        "local_only": False,
        "record": [SHARD, *values],
        "parity_valid": True,
        "parity_root": bytes(range(64, 96)),
        "stripe_table": [[member, *values] for member in MEMBERS],
    }
    free = newest_copy(arena_bytes, 32768, 16384, kind=2, index=0)
    assert (free["state"], free["snapshot"], free["iteration"]) == (0, None, -1)


def test_permit_and_progress_by_hand(arena_bytes: bytes) -> None:
    permit = newest_copy(arena_bytes, 20480, 2048, kind=3, index=0)
    assert permit == {
        "snapshot": [7, 92],
        "iteration": 1240,
        "slot": 0,
        "revoked": True,
        "stay": 0.0,
    }
    assert newest_copy(arena_bytes, 24576, 2048, kind=4, index=0) == 1239


def test_regions_by_hand(arena_bytes: bytes) -> None:
    start = 32768 * 3
    data, parity, digests = 12288, 8192, 4096
    span = data + parity + digests
    assert len(arena_bytes) == start + 2 * span
    for slot in range(2):
        at = start + slot * span
        assert arena_bytes[at : at + 12288] == bytes([0xD0 + slot]) * 12288
        at += data
        assert arena_bytes[at : at + 6144] == bytes([0xA0 + slot]) * 6144
        assert arena_bytes[at + 6144 : at + 8192] == bytes(2048)
        at += parity
        assert arena_bytes[at : at + 48] == bytes([0xE0 + slot, 0, 0, 0, 0, 0, 0, 0]) * 6
        assert arena_bytes[at + 48 : at + 4096] == bytes(4048)


geometries = st.builds(
    Geometry,
    st.integers(1, 8),
    st.integers(1, 1 << 50),
    st.integers(0, 1 << 50),
    st.integers(1, 1 << 40),
)


@given(geometries)
def test_regions_are_disjoint_aligned_and_inside(sizes: Geometry) -> None:
    regions = [(0, 32768)]
    for slot in range(sizes.slot_count):
        regions += [
            (sizes.slot_header_offset(slot), 32768),
            (sizes.data_offset(slot), sizes.data_bytes),
            (sizes.parity_offset(slot), sizes.parity_bytes),
            (sizes.parity_digest_offset(slot), 8 * sizes.parity_blocks),
        ]
    assert all(start % 4096 == 0 for start, _ in regions)
    occupied = sorted((start, start + length) for start, length in regions if length)
    ends = [end for _, end in occupied]
    overlaps = [start for end, (start, _) in zip(ends, occupied[1:], strict=False) if start < end]
    assert not overlaps, f"the region that starts at {overlaps[0]} lies in another one"
    assert max(ends) <= sizes.file_bytes
    assert sizes.parity_blocks * sizes.block_bytes >= sizes.parity_bytes


@given(st.integers(0, 1 << 40), st.integers(1, 63), st.integers(0, 8), st.integers(1, 1 << 24))
def test_stripe_geometry_pads_to_whole_blocks(need: int, k: int, m: int, block: int) -> None:
    sizes = Geometry.for_stripe(
        slot_count=2, required_bytes=need, data_members=k, parity_members=m, block_bytes=block
    )
    assert need <= sizes.data_bytes < max(need, 1) + k * block
    assert sizes.data_bytes % (k * block) == 0
    assert sizes.parity_bytes * k == m * sizes.data_bytes
    assert sizes.parity_bytes % block == 0


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    sizes = Geometry(2, 4096, 0, 4096)
    for offset in (sizes.data_offset, sizes.parity_offset, sizes.slot_header_offset):
        with pytest.raises(ValueError, match="slot -?[0-9] does not exist"):
            offset(slot)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"codec": "raid"}, "codec"),
        ({"data_members": 3}, "is not 3"),
        ({"data_members": 0, "parity_members": 3}, "k >= 1"),
        ({"member_index": 0}, "member 0"),
        ({"member_index": 3}, "member 3"),
        ({"members": (MEMBERS[0], SHARD, SHARD)}, "different"),
        ({"shard_id": "../escape"}, "shard id"),
        ({"geometry": Geometry(2, 12288 + 1024, 6656, 1024)}, "not a multiple"),
        ({"geometry": Geometry(2, 12288, 6143, 1024)}, "parity_bytes"),
    ],
)
def test_an_inconsistent_header_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make_header(**change)


counts = st.integers(0, (1 << 63) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
shard_ids = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}", fullmatch=True)
snapshots = st.builds(SnapshotId, counts, counts)
hashes = st.binary(min_size=32, max_size=32)
records = st.builds(SealedRecord, shard_ids, snapshots, *[counts] * 6, hashes, hashes)
slots = st.builds(
    SlotHeader,
    st.sampled_from(SlotState),
    st.none() | snapshots,
    i64,
    st.booleans(),
    st.none() | records,
    st.booleans(),
    hashes,
    st.lists(records, max_size=4).map(tuple),
)
ancestors = st.builds(Ancestor, counts, st.none() | snapshots)


@given(slots)
def test_slot_headers_round_trip(slot: SlotHeader) -> None:
    assert binary.unpack_slot(binary.pack(slot)) == slot


def test_the_largest_stripe_table_round_trips() -> None:
    most = (1 << 63) - 1
    sizes = dict.fromkeys(SealedRecord.__struct_fields__[3:8], most)
    record = make_record(
        shard_id="s" * 64, snapshot=SnapshotId(most, most), iteration=most, **sizes
    )
    table = (record,) * 64
    slot = make_slot(stripe_table=table, record=record)
    packed = binary.pack(slot)
    assert binary.unpack_slot(packed) == slot
    assert binary.ENVELOPE_BYTES + len(packed) <= 16384
    with pytest.raises(ValueError, match="stripe_table has 65"):
        make_slot(stripe_table=(*table, make_record()))


@given(counts, st.lists(ancestors, max_size=64).map(tuple), st.uuids())
def test_headers_round_trip(
    incarnation: int, lineage: tuple[Ancestor, ...], job: uuid.UUID
) -> None:
    header = make_header(incarnation=incarnation, lineage=lineage, job=job)
    assert binary.unpack_header(binary.pack_header(header)) == header


def test_the_largest_stripe_round_trips_and_old_ancestors_go() -> None:
    members = tuple(f"{number:064}" for number in range(64))
    most = (1 << 63) - 1
    lineage = tuple(Ancestor(most, SnapshotId(most, number)) for number in range(70))
    header = make_header(
        shard_id=members[63], members=members, member_index=63, data_members=62, parity_members=2,
        lineage=lineage, geometry=Geometry(8, 62 * 1024, 2 * 1024, 1024),
    )  # fmt: skip
    packed = binary.pack_header(header)
    assert binary.unpack_header(packed) == dataclasses.replace(header, lineage=lineage[6:])
    assert binary.ENVELOPE_BYTES + len(packed) <= 8192


@given(st.none() | st.builds(Permit, snapshots, i64, st.integers(0, 7), st.booleans()), i64)
def test_permit_and_progress_round_trip(permit: Permit | None, iteration: int) -> None:
    assert binary.unpack_permit(binary.pack(permit)) == permit
    assert binary.unpack_progress(binary.pack(iteration)) == iteration


@pytest.mark.parametrize(
    "pack",
    [
        lambda: binary.pack(make_slot(iteration=1 << 64)),
        lambda: binary.pack_header(make_header(incarnation=1 << 64)),
        lambda: binary.pack(1 << 64),
    ],
)
def test_a_number_too_large_is_refused(pack) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        pack()


edits = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1)


@given(edits)
def test_nonsense_with_a_right_hash_is_corrupt_and_nothing_worse(edits) -> None:
    """Parsers alone, as if the commit word matched: only ArenaCorruptError may come out."""
    for pack, unpack, value in (
        (binary.pack, binary.unpack_slot, make_slot()),
        (binary.pack_header, binary.unpack_header, make_header()),
    ):
        raw = bytearray(pack(value))
        for at, byte in edits:
            raw[at % len(raw)] = byte
        try:
            parsed = unpack(bytes(raw))
        except ArenaCorruptError:
            continue
        assert unpack(pack(parsed)) == parsed


@pytest.mark.parametrize(
    ("unpack", "value", "field", "wrong"),
    [
        (binary.unpack_header, make_header(), "shard_id", "/etc"),
        (binary.unpack_header, make_header(), "codec", "raid"),
        (binary.unpack_header, make_header(), "members", ["a"] * 65),
        (binary.unpack_header, make_header(), "job", "nobody"),
        (binary.unpack_slot, make_slot(), "state", 7),
        (binary.unpack_slot, make_slot(), "parity_root", b""),
        (binary.unpack_slot, make_slot(), "record", ["/etc"]),
        (binary.unpack_slot, make_slot(), "snapshot", [1]),
    ],
)
def test_each_value_outside_its_range_is_corrupt(unpack, value, field, wrong) -> None:
    plain = msgspec.to_builtins(value, builtin_types=(bytes,)) | {field: wrong}
    with pytest.raises(ArenaCorruptError, match="passes its hash"):
        unpack(msgspec.msgpack.encode(plain))
