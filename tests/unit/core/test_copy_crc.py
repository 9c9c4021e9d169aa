"""The one pass of copy_crc.c: the bytes arrive, no others change, the bits are ISA-L's."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.core import copy_crc, isal
from megatron_ft.core.copy_crc import Bytes, CopyCrc, Parts

NOISE = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)

lengths = st.one_of(st.integers(0, 1_500), st.integers(0, 70_000))


@pytest.fixture(params=[1, 2, 3], ids=["128 bits", "256 bits", "512 bits"], scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[CopyCrc]:
    """As on processors with products of this width."""
    found = copy_crc.find()
    if not isinstance(found, CopyCrc):
        pytest.skip(found)
    functions = ctypes.CDLL(found.path)
    best = functions.copy_crc_level()
    if request.param > best:
        pytest.skip("this processor has no products of that width")
    functions.copy_crc_use(request.param)
    yield found
    functions.copy_crc_use(best)


def crcs(data: Bytes, block: int) -> list[int]:
    return [isal.crc64(data[at : at + block]) for at in range(0, data.size, block)]


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(0, 99), st.integers(0, 99), st.integers(1, 9_000), st.booleans())
def test_blocks_have_the_digests_of_isa_l_whatever_length_and_alignment(
    library: CopyCrc, length: int, skip: int, start: int, block: int, moves: bool
) -> None:
    source = NOISE[skip : skip + length]
    memory = np.full(length + 200, 7, np.uint8)
    target = memory[start : start + length]
    found = np.zeros(-(-length // block), np.uint64)
    library.blocks(source, target if moves else None, block, found)
    assert found.tolist() == crcs(source, block)
    expected = np.full(length + 200, 7, np.uint8)
    if moves:
        expected[start : start + length] = source
    assert np.array_equal(memory, expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(lengths, st.integers(0, 99)), max_size=5), st.integers(0, 99))
def test_a_stream_brings_every_byte_and_no_other(
    library: CopyCrc, cut: list[tuple[int, int]], skip: int
) -> None:
    memory = np.full(sum(length + gap for length, gap in cut) + 99, 7, np.uint8)
    expected, at, rows = memory.copy(), skip, []
    for length, gap in cut:
        length = min(length, max(0, memory.size - at))
        rows.append((memory.ctypes.data + at, NOISE.ctypes.data + skip, length))
        expected[at : at + length] = NOISE[skip : skip + length]
        at += length + gap
    library.stream(Parts(*np.array(rows, np.int64).reshape(-1, 3).T))
    assert np.array_equal(memory, expected)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(1, 3_000), min_size=1, max_size=12),
    st.sampled_from([64, 512, 4096, 65536]),
    st.integers(1, 3),
    st.data(),
)
def test_parts_in_any_order_and_thread_make_the_digests_of_their_blocks(
    library: CopyCrc, cut: list[int], block: int, threads: int, data: st.DataObject
) -> None:
    """Parts that are copied, filled with zeros, or only read."""
    total = -(-sum(cut) // block) * block
    cut = [*cut, total - sum(cut)]
    starts = np.cumsum([0, *cut])[:-1].tolist()
    region, expected = np.full(total, 9, np.uint8), np.full(total, 9, np.uint8)
    ways = [data.draw(st.sampled_from(["copied", "zeros", "read"])) for _ in cut]
    arrivals = Arrivals(library, region, block)
    work = []
    for start, length, way in zip(starts, cut, ways, strict=True):
        to = region.ctypes.data + start
        source = {"copied": NOISE.ctypes.data + start, "zeros": 0, "read": to}[way]
        if way != "read":
            bytes_now = NOISE[start : start + length] if way == "copied" else 0
            expected[start : start + length] = bytes_now
        work.append(Parts([to], [source], [length]))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(arrivals.copy, data.draw(st.permutations(work))))
    found, right = arrivals.known(total // block)
    assert np.array_equal(region, expected) and right.all()
    assert found.tolist() == crcs(region, block)


def test_a_block_that_lacks_a_byte_or_has_one_twice_is_not_known(library: CopyCrc) -> None:
    region = np.zeros(4 * 512, np.uint8)
    arrivals = Arrivals(library, region, 512)
    arrivals.count(0, 512)
    arrivals.count(512, 1023)
    arrivals.count(1024, 2048)
    arrivals.count(1100, 1101)
    assert arrivals.known(4)[1].tolist() == [True, False, False, True]


def test_no_part_goes_beyond_its_region(library: CopyCrc) -> None:
    memory = np.zeros(4096, np.uint8)
    arrivals = Arrivals(library, memory[1024:2048], 512)
    for start in (1023, 2000):
        to = memory.ctypes.data + start
        with pytest.raises(ValueError, match="outside"):
            arrivals.copy(Parts([to], [NOISE.ctypes.data], [100]))
    assert not memory.any()


def test_what_a_thread_of_the_pool_raised_is_raised(library: CopyCrc) -> None:
    region = np.zeros(1024, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        arrivals = Arrivals(library, region, 512, pool)
        arrivals.read([region.ctypes.data], [9999])
        arrivals.settle()
        with pytest.raises(ValueError, match="outside"):
            arrivals.known(2)


def reason_in(folder: Path, **variables: str) -> str:
    """What a process with another copy of the module says."""
    (folder / "copied.py").write_bytes(Path(copy_crc.__file__).read_bytes())
    program = "import copied; print(copied.load(), copied.describe(), copied.advice())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_reason_for_two_passes_is_said(tmp_path: Path) -> None:
    assert "None" in (said := reason_in(tmp_path)) and "install a C compiler" in said
    (tmp_path / "_copy_crc.abi3.so").write_text("not for this machine")
    assert "None" in (said := reason_in(tmp_path)) and "cannot be loaded" in said
    said = reason_in(tmp_path, **{copy_crc.WITHOUT: "1"})
    assert "None" in said and f"{copy_crc.WITHOUT} is set" in said


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([64, 300, 1000, 4096]),
    st.integers(0, 4095),
    st.lists(st.integers(0, 3_000), max_size=12),
    st.data(),
)
def test_what_was_verified_is_copied_and_nothing_else(
    library: CopyCrc, blocks: int, block: int, short: int, cut: list[int], data: st.DataObject
) -> None:
    """Parts of any lengths, cut where blocks end, to any alignment."""
    length = blocks * block - min(short, block - 1)
    source = NOISE[:length].copy()
    expected = np.array(crcs(source, block), np.uint64)
    wrong = data.draw(st.sets(st.integers(0, blocks - 1), max_size=3))
    for number in wrong:
        first = number * block
        source[data.draw(st.integers(first, min(first + block, length) - 1))] ^= 1
    gap = data.draw(st.integers(0, 70))
    memory = np.full(length + gap * (len(cut) + 2 * blocks) + 99, 7, np.uint8)
    wanted, rows, ends, at, to = memory.copy(), [], [], 0, gap
    edges = sorted({*np.cumsum(cut).tolist(), *range(block, length, block), length})
    for edge in (edge for edge in edges if 0 < edge <= length):
        number = at // block
        if data.draw(st.booleans()):
            rows.append((memory.ctypes.data + to, source.ctypes.data + at, edge - at))
            if number not in wrong:
                wanted[to : to + edge - at] = source[at:edge]
            to += edge - at + gap
        if edge % block == 0 or edge == length:
            ends.append(len(rows))
        at = edge
    parts = np.array(rows, np.uint64).reshape(-1, 3)
    found = library.verified(source, block, expected, parts, np.array(ends, np.uint64))
    assert found == sorted(wrong)
    assert np.array_equal(memory, wanted)
