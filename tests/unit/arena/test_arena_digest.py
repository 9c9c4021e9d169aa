"""Sealing and verifying: every length, every flipped bit, hostile records."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena import digest
from megatron_ft.core import isal
from megatron_ft.core.errors import ArenaCorruptError, ArenaError
from megatron_ft.core.identity import SealedRecord, SnapshotId
from tests.support.arena_samples import SHARD

BLOCK = 256
LENGTHS = [0, 1, 63, 64, 65, 251, 256, 1021]


def dirty_region(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def sealed(
    tensor_bytes: int, meta: bytes, *, spare: int = 200, block: int = BLOCK
) -> tuple[np.ndarray, SealedRecord]:
    """A region that was full of other bytes, and its record."""
    data = dirty_region(digest.required_bytes(tensor_bytes, len(meta), block) + spare)
    return data, seal(data, tensor_bytes, meta, block=block)


def seal(data: np.ndarray, tensor_bytes: int, meta: bytes, *, block: int = BLOCK) -> SealedRecord:
    return digest.seal(
        data,
        shard_id=SHARD,
        snapshot=SnapshotId(7, 91),
        iteration=1234,
        tensor_bytes=tensor_bytes,
        meta=meta,
        layout_hash=bytes(32),
        block_bytes=block,
    )


@pytest.mark.parametrize("tensor_bytes", LENGTHS)
@pytest.mark.parametrize("meta_bytes", [0, 1, 64, 997])
def test_a_sealed_region_verifies(tensor_bytes: int, meta_bytes: int) -> None:
    meta = dirty_region(meta_bytes, 5).tobytes()
    data, record = sealed(tensor_bytes, meta)
    assert np.array_equal(data[:tensor_bytes], dirty_region(data.size)[:tensor_bytes])
    assert digest.verify_root(data, record)
    assert digest.verify_shard(data, record, BLOCK) == []
    assert digest.read_meta(data, record) == meta
    assert record.used_bytes == digest.required_bytes(tensor_bytes, meta_bytes, BLOCK)


@given(st.integers(0, 2000), st.integers(1, 600), st.integers(0, 10**6), st.integers(0, 7))
def test_objects_are_checked_without_reading_tensors(
    tensor_bytes: int, meta_bytes: int, position: int, bit: int
) -> None:
    data, record = sealed(tensor_bytes, bytes(meta_bytes))
    at = position % record.used_bytes
    data[at] ^= 1 << bit
    check = digest.BlockCheck(data, record, BLOCK)
    bad = check.bad(digest.first_meta_block(record, BLOCK), check.blocks)
    first = record.meta_offset // BLOCK * BLOCK
    assert bool(bad) == (at >= first)
    if first <= at < record.digest_offset:
        assert bad == [at // BLOCK]


def test_the_region_by_hand() -> None:
    """Offsets, digests and root computed from docs/reference/arena-format.md alone."""
    data, record = sealed(100, b"m" * 70)
    assert (record.meta_offset, record.digest_offset) == (128, 256)
    assert record.used_bytes == 256 + 8
    raw, before = data.tobytes(), dirty_region(data.size).tobytes()
    assert raw[100:128] == bytes(28)
    assert raw[128:198] == b"m" * 70
    assert raw[198:256] == bytes(58)
    assert raw[256:264] == isal.crc64(data[:256]).to_bytes(8, "little")
    assert raw[264:] == before[264:], "padding is nobody's"
    fields = [SHARD, [7, 91], 1234, 100, 128, 70, 256, 264, bytes(32), b""]
    root = hashlib.blake2b(raw[256:264] + msgspec.msgpack.encode(fields), digest_size=32)
    assert record.digest_root == root.digest()


def test_crc64_is_the_published_one() -> None:
    # The check value of CRC-64/XZ for the digits 1 to 9.
    assert digest.digest_block(np.frombuffer(b"123456789", np.uint8)) == 0x995DC9BBDF1939FA


def test_every_flipped_bit_is_found() -> None:
    data, record = sealed(300, b"objects", spare=24)
    blocks = digest.table_entries(record.digest_offset, BLOCK)
    for position in range(8 * data.size):
        at, mask = position // 8, np.uint8(1 << position % 8)
        data[at] ^= mask
        bad = digest.verify_shard(data, record, BLOCK)
        if at < record.digest_offset:
            assert bad == [at // BLOCK]
        elif at < record.used_bytes:
            assert bad == list(range(blocks))
        else:
            assert bad == []
        data[at] ^= mask
    assert digest.verify_shard(data, record, BLOCK) == []


@pytest.mark.parametrize("field", SealedRecord.__struct_fields__)
def test_every_changed_field_of_the_record_is_found(field: str) -> None:
    data, record = sealed(300, b"objects")
    value = getattr(record, field)
    changed = {str: "other", bytes: bytes(31) + b"\1", int: 17}.get(type(value), SnapshotId(7, 92))
    other = msgspec.structs.replace(record, **{field: changed})
    assert not digest.verify_root(data, other)
    assert digest.verify_shard(data, other, BLOCK) != []


def test_an_empty_shard_with_a_wrong_root_is_not_good() -> None:
    data, record = sealed(0, b"")
    assert digest.verify_shard(data, record, BLOCK) == []
    wrong = msgspec.structs.replace(record, digest_root=bytes(32))
    assert digest.verify_shard(data, wrong, BLOCK) == [0]


def test_another_block_size_is_not_good() -> None:
    data, record = sealed(1000, b"objects")
    assert digest.verify_shard(data, record, BLOCK // 2) != []


def test_a_shard_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    exact = digest.required_bytes(1000, 100, BLOCK)
    seal(dirty_region(exact), 1000, bytes(100))
    small = dirty_region(exact - 1)
    before = small.copy()
    with pytest.raises(digest.ArenaCapacityError, match="plan it again") as caught:
        seal(small, 1000, bytes(100))
    assert isinstance(caught.value, ArenaError)
    assert np.array_equal(small, before)


@given(st.integers(0, 5000), st.integers(0, 500), st.integers(0, 500), st.integers(1, 700))
def test_the_planned_bytes_suffice_for_any_smaller_meta(
    tensor_bytes: int, meta_bytes: int, slack: int, block: int
) -> None:
    planned = digest.required_bytes(tensor_bytes, meta_bytes + slack, block)
    record = seal(np.zeros(planned, np.uint8), tensor_bytes, bytes(meta_bytes), block=block)
    assert record.used_bytes <= planned


@settings(max_examples=300)
@given(st.tuples(*[st.integers(-(1 << 63), 1 << 64) | st.integers(-2, 700)] * 5))
def test_a_record_of_any_numbers_never_reads_outside(numbers: tuple[int, ...]) -> None:
    data, good = sealed(300, b"objects", spare=24)
    names = ("tensor_bytes", "meta_offset", "meta_bytes", "digest_offset", "used_bytes")
    record = msgspec.structs.replace(good, **dict(zip(names, numbers, strict=True)))
    assert digest.verify_root(data, record) == (record == good)
    assert (digest.verify_shard(data, record, BLOCK) == []) == (record == good)
    for read in (digest.digest_table, digest.read_meta):
        try:
            read(data, record)
        except ArenaCorruptError:
            continue


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tensor_bytes", -301),
        ("tensor_bytes", 100),
        ("meta_offset", -100),
        ("meta_bytes", -8),
        ("meta_bytes", 100),
        ("digest_offset", 1000),
        ("used_bytes", 1),
        ("used_bytes", -32),
        ("used_bytes", 8000),
    ],
)
def test_lengths_out_of_order_or_outside_are_corrupt(field: str, change: int) -> None:
    data, good = sealed(300, b"objects", spare=24)
    record = msgspec.structs.replace(good, **{field: getattr(good, field) + change})
    for read in (digest.digest_table, digest.read_meta):
        with pytest.raises(ArenaCorruptError, match="cannot hold"):
            read(data, record)
    assert not digest.verify_root(data, record)
    assert digest.verify_shard(data, record, BLOCK) != []


def test_out_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="have 3 blocks"):
        digest.digest_blocks(np.zeros(600, np.uint8), BLOCK, np.zeros(2, np.uint64))


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that wait for the GIL get it at the next chance, not after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def ran_beside(block: np.ndarray) -> bool:
    """Whether this thread ran in the middle half of another thread's one call."""
    started, span = threading.Event(), []

    def work() -> None:
        started.set()
        begin = time.perf_counter()
        digest.digest_block(block)
        span.extend((begin, time.perf_counter()))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    moments = []
    while len(span) < 2:
        moments.append(time.perf_counter())
    thread.join()
    quarter = (span[1] - span[0]) / 4
    return any(span[0] + quarter < moment < span[1] - quarter for moment in moments)


def test_digesting_leaves_the_interpreter_to_other_threads(eager_threads: None) -> None:
    block = np.zeros(64 << 20, np.uint8)
    # On a busy machine this thread may get no core in time; with the GIL held it never runs.
    assert any(ran_beside(block) for _ in range(20))


@given(st.integers(0, 5000), st.integers(1, 7), st.booleans(), st.data())
def test_runs_of_blocks_find_what_one_look_finds(
    tensor_bytes: int, run: int, joined: bool, data: st.DataObject
) -> None:
    region, record = sealed(tensor_bytes, b"objects")
    for at in data.draw(st.lists(st.integers(0, record.used_bytes - 1), max_size=3)):
        region[at] ^= 1
    check = digest.BlockCheck(region, record, BLOCK, run if joined else 1)
    starts = range(0, check.blocks, run)
    found = [number for at in starts for number in check.bad(at, min(at + run, check.blocks))]
    assert found == digest.verify_shard(region, record, BLOCK)


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_any_blocks_may_be_asked_about_not_only_a_run(run: int) -> None:
    region, record = sealed(20 * BLOCK + 9, b"objects")
    for damaged in range(0, 20, 3):
        region[damaged * BLOCK + 77] ^= 1
        check = digest.BlockCheck(region, record, BLOCK, run)
        for first, stop in itertools.combinations(range(check.blocks + 1), 2):
            assert check.bad(first, stop) == [damaged] * (first <= damaged < stop)
        region[damaged * BLOCK + 77] ^= 1


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 4), st.integers(0, 99))
def test_crcs_of_runs_follow_from_those_of_blocks(
    block: int, run: int, runs: int, more: int
) -> None:
    content = dirty_region(block * (run * runs + more % run), block)
    crcs = np.array(
        [isal.crc64(content[at : at + block]) for at in range(0, content.size, block)], np.uint64
    )
    long = run * block
    expected = [isal.crc64(content[at * long : (at + 1) * long]) for at in range(runs)]
    assert digest.joined_crcs(crcs, block, run).tolist() == expected
