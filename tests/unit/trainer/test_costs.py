"""What snapshots cost, counted rather than timed: calls, bytes, passes, memory, messages."""

from __future__ import annotations

import ctypes
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.arena import digest
from megatron_ft.core import copy_crc, isal
from megatron_ft.core.copy_crc import CopyCrc, Parts
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure import encode as encoding
from megatron_ft.erasure import member as member_module
from megatron_ft.erasure.codec import Codec, open_codec
from megatron_ft.erasure.member import StripeCode
from megatron_ft.erasure.rebuild import rebuild
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    TURNS_EARLY,
    TURNS_LATE,
    Ahead,
    Link,
    MessageKind,
    barrier,
    kind_of,
)
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import TrainerClient
from megatron_ft.supervisor.cycle import Send, SnapshotCycle, SnapshotEnded
from megatron_ft.supervisor.schedule import Schedule
from megatron_ft.trainer import sample
from megatron_ft.trainer.cpu import CpuCopier
from tests.support.calls import BLOCK, PIECE, calls_of, calls_of_save, ready, saved
from tests.support.captures import FakeSmp, make_manager
from tests.support.copies import each_way
from tests.support.erasure_samples import (
    coded_of,
    make_code,
    make_lost,
    make_member,
    protected,
    used_of,
)
from tests.support.stripe_runs import succeed

SIZE = 40_000
"""Elements of a tensor: more than torch would copy in one thread, and no counter."""

MOST_CALLS, MOST_C_CALLS = 11, 12
"""Of a restore, for each tensor."""


@pytest.fixture
def smp(tmp_path: Path) -> Iterator[FakeSmp]:
    made = FakeSmp(tmp_path, block_bytes=BLOCK)
    yield made
    if made.arena is not None:
        made.arena.close()


def tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((SIZE,), float(number)) for number in range(count)}


def test_a_save_calls_nothing_for_a_tensor_that_stays(tmp_path: Path) -> None:
    """Tensors, and the layout, are compared with those of last time in calls that loop in C."""
    few, many = (calls_of_save(tmp_path / str(count), tensors(count)) for count in (4, 404))
    assert many["call"] - few["call"] < 40, (few, many)
    assert many["c_call"] - few["c_call"] < 40, (few, many)
    assert few["call"] < 300, few


def test_a_fence_asks_no_tensor(smp: FakeSmp) -> None:
    """It stands in every iteration, with a snapshot or without."""
    manager = ready(smp, tensors(300))

    def fence() -> None:
        with manager.fence():
            pass

    fence()
    found = calls_of(fence)
    assert sum(found.values()) < 60, found
    manager.close()


def test_a_copy_asks_each_tensor_once_where_it_is(smp: FakeSmp) -> None:
    state = tensors(300)
    manager = ready(smp, state)
    engine = manager._captures._arena.engine
    assert engine is not None
    _, later = engine.binding.later(state, engine.binding.bind(state), 0)
    copier = CpuCopier(PIECE)
    copier.copy(later, None, lambda: False)
    found = calls_of(lambda: copier.copy(later, None, lambda: False))
    assert found["c_call"] <= 300 + 20, found
    assert found["call"] <= 300, found
    manager.close()


def calls_of_load(folder: Path, count: int) -> Counter[str]:
    folder.mkdir()
    smp, state = FakeSmp(folder, block_bytes=BLOCK), tensors(count)
    ready(smp, state).close()
    smp.offer_last()
    manager = make_manager(smp)
    found = calls_of(lambda: manager.load(into=state))
    assert smp.arena is not None
    smp.arena.close()
    return found


def test_a_restore_makes_so_many_calls_a_tensor(tmp_path: Path) -> None:
    """Enumerating, comparing the layout and asking where it lies: all that Python does of it."""
    few, many = (calls_of_load(tmp_path / str(count), count) for count in (4, 404))
    assert many["call"] - few["call"] <= 400 * MOST_CALLS, (few, many)
    assert many["c_call"] - few["c_call"] <= 400 * MOST_C_CALLS, (few, many)


class Passes:
    """Counts bytes that are copied and bytes that are digested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied = self.digested = 0
        memmove, positive, digest_blocks = ctypes.memmove, np.positive, digest.digest_blocks
        crc64 = isal.crc64

        def copy(target: int, source: int, length: int) -> int:
            self.copied += length
            return memmove(target, source, length)

        def digested(buffer: Bytes, *others: Any) -> None:
            self.digested += buffer.nbytes
            digest_blocks(buffer, *others)

        def joined(buffer: Bytes) -> int:
            self.digested += buffer.nbytes
            return crc64(buffer)

        def by_loop(source: Bytes, out: Bytes) -> Bytes:
            self.copied += source.nbytes
            return positive(source, out=out)

        parts, stream, verified = CopyCrc.parts, CopyCrc.stream, CopyCrc.verified

        def fused(library: CopyCrc, some: Parts, *others: Any) -> None:
            targets, sources, lengths = some.rows.T
            self.copied += int(lengths[(sources != 0) & (sources != targets)].sum())
            self.digested += int(lengths.sum())
            parts(library, some, *others)

        def streamed(library: CopyCrc, some: Parts) -> None:
            self.copied += int(some.rows[:, 2].sum())
            stream(library, some)

        def checked(library: CopyCrc, source: Bytes, *others: Any) -> list[int]:
            self.digested += source.nbytes
            self.copied += int(others[2][:, 2].sum())
            return verified(library, source, *others)

        monkeypatch.setattr(CopyCrc, "verified", checked)
        monkeypatch.setattr(CopyCrc, "parts", fused)
        monkeypatch.setattr(CopyCrc, "stream", streamed)
        monkeypatch.setattr(ctypes, "memmove", copy)
        monkeypatch.setattr(np, "positive", by_loop)
        monkeypatch.setattr(digest, "digest_blocks", digested)
        monkeypatch.setattr(member_module, "digest_blocks", digested)
        monkeypatch.setattr(isal, "crc64", joined)


@pytest.mark.usefixtures(each_way.__name__)
def test_a_byte_is_copied_once_and_digested_once(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: into the arena, and back."""
    state = tensors(20)
    size = sum(tensor.nbytes for tensor in state.values())
    manager = ready(smp, state)
    passes = Passes(monkeypatch)
    saved(manager, smp, state, 3)
    record: SealedRecord = max(smp.sealed_records.items())[1]
    # The tensors in a last short block are digested as they pass, and again with the objects.
    again = record.digest_offset % BLOCK and record.tensor_bytes % BLOCK
    again = again if copy_crc.load() and record.digest_offset - record.tensor_bytes < BLOCK else 0
    sampled = sample.PIECES * sample.PIECE_BYTES if copy_crc.load() else 0
    assert (passes.copied, passes.digested) == (size + sampled, record.digest_offset + again)
    manager.close()
    smp.offer_last()
    fresh = {name: torch.zeros(SIZE) for name in state}
    passes.copied = passes.digested = 0
    assert make_manager(smp).load(into=fresh) == 3
    # What lies in one block with the first of the objects is verified for these, and again.
    assert record.tensor_bytes % BLOCK
    shared = min(BLOCK, record.digest_offset - record.tensor_bytes // BLOCK * BLOCK)
    assert (passes.copied, passes.digested) == (size, record.digest_offset + shared)
    assert all(torch.equal(fresh[name], state[name]) for name in state)


def test_a_capture_allocates_less_than_a_tensor(smp: FakeSmp) -> None:
    """Neither buffers nor lists that grow with the state; what torch allocates is not seen here."""
    state = tensors(200)
    manager = ready(smp, state)
    tracemalloc.start()
    try:
        saved(manager, smp, state, 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SIZE * 4, f"{peak} bytes at once for a snapshot of {200 * SIZE * 4}"
    manager.close()


def test_a_snapshot_takes_three_messages_of_its_trainer(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is asked of the SMP in between."""
    state = tensors(3)
    manager = ready(smp, state)
    told: Counter[str] = Counter()

    def counted(name: str, tell: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words, **more: (told.update([name]), tell(*words, **more))[1]

    for name in [name for name in vars(TrainerClient) if not name.startswith("_")]:
        monkeypatch.setattr(smp, name, counted(name, getattr(smp, name)))
    saved(manager, smp, state, 3)
    assert told == {"send": 3}, "it begins, its cost, it has sealed"
    manager.close()


@pytest.mark.parametrize("nodes", [2, 64])
def test_a_snapshot_takes_three_requests_to_a_node(nodes: int) -> None:
    """Permit, encode, commit: one each, however many shards the node has."""
    shards = {f"pp0-tp{t}-dp{n}-ep0": f"n{n}" for n in range(nodes) for t in range(4)}
    stripes = tuple(_stripe(first, t) for first in range(0, nodes, 2) for t in range(4))
    cycle = SnapshotCycle(1, shards, stripes, Schedule(1))
    sent: Counter[str] = Counter()

    def note(actions: list[Any]) -> list[Any]:
        sent.update(a.node for a in actions if isinstance(a, Send))
        return actions

    note(cycle.propose(0, "w1"))
    for shard in shards:
        note(cycle.handle(shards[shard], m.Sealed(_record(shard, cycle))))
    for shard in shards:
        body = m.Encoded(cycle.snapshot, "w1", shard, b"", (), 0, 0.0)
        last = note(cycle.handle(shards[shard], body))
    for commit in last:
        ended = note(cycle.answered(commit.node, commit.message, m.Ok()))
    assert [type(action) for action in ended] == [SnapshotEnded] and ended[0].level == "protected"
    assert set(sent.values()) == {3} and len(sent) == nodes


def _stripe(first: int, tensor_rank: int) -> Any:
    """Of two nodes, one beside the other."""
    return m.StripeOrder(
        index=4 * first + tensor_rank,
        kind="xor",
        data_members=1,
        parity_members=1,
        data_bytes=1,
        block_bytes=1,
        members=tuple(f"pp0-tp{tensor_rank}-dp{first + n}-ep0" for n in range(2)),
        world_ranks=(first, first + 1),
        arenas={},
        slots={},
    )


def _record(shard: str, cycle: SnapshotCycle) -> SealedRecord:
    return SealedRecord(shard, cycle.snapshot, cycle.iteration, 0, 0, 0, 0, 0, b"", b"")


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_parity_is_computed_in_place_by_one_call_of_the_library(verb: str) -> None:
    """Whatever the length of the piece; beside the columns nothing is allocated."""
    codec = open_codec("rs", 8, 2)
    kernel = codec.kernel(*([8, 9], range(8)) if verb == "encode" else ([0, 1], range(2, 10)))

    def cost(length: int) -> tuple[Counter[str], int]:
        columns = [np.ones(length, np.uint8) for _ in range(10)]
        kernel(columns[:8], columns[8:])
        calls = calls_of(lambda: kernel(columns[:8], columns[8:]))
        tracemalloc.start()
        try:
            kernel(columns[:8], columns[8:])
            return calls, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    (few, _), (many, memory) = cost(4096), cost(1 << 20)
    assert few == many and sum(few.values()) < 200
    assert memory < 65536


SHAPES = [("rs", 3, 1), ("rs", 2, 2), ("xor", 1, 1), ("replica", 1, 2), ("xor", 3, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_encoding_reads_each_byte_as_often_as_it_must(
    shape: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data are digested once, after they have travelled, and only their sum where that is less;
    parity where it is computed, which may be that sum, and once more if it travels.  Copies are
    not computed, and are digested as the data that they are.
    """
    kind, k, parities = shape
    size = 64 << 10
    monkeypatch.setattr(member_module, "PIECE_BYTES", 8 << 10)
    code = make_code(kind, k, parities, [size] * (k + parities), 512)
    members = [make_member(code, n, size) for n in range(k + parities)]
    passes = Passes(monkeypatch)
    coded = 0
    plain_kernel = Codec.kernel

    def counted(codec: Codec, *symbols: Any, **more: Any) -> Any:
        kernel = plain_kernel(codec, *symbols, **more)

        def run(columns: Any, outputs: Any) -> None:
            nonlocal coded
            coded += sum(column.nbytes for column in columns)
            kernel(columns, outputs)

        return run

    monkeypatch.setattr(Codec, "kernel", counted)
    peers = range(k + parities)
    succeed(k + parities, lambda n, t: encoding.encode(code, members[n], t, peers))
    chunks, copies = (k + parities) * code.chunk_bytes, k == 1
    # Beyond the digest table bytes are compared with the table or are padding, and not digested.
    least = chunks * (parities - 1 if copies else 2 * parities - 1)
    data = passes.digested - least
    # The blocks that data share with their tables are digested apart from others.
    shared = (k + parities) * (code.block_bytes if copies else code.piece_bytes)
    sources = {("rs", 3): 1, ("xor", 3): 0}.get((kind, k), k)
    assert 0 < data <= chunks * sources + (shared if copies or sources < k else 0)
    assert coded == (0 if copies else chunks * k)
    if k + parities == 2:
        assert all(np.array_equal(members[n].parity, coded_of(members[1 - n])) for n in (0, 1))


def test_rebuilding_reads_each_byte_as_often_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of sources and solved parity once, what is rebuilt once as it arrives."""
    k, parities, size = 3, 1, 64 << 10
    monkeypatch.setattr(member_module, "PIECE_BYTES", 8 << 10)
    code = make_code("rs", k, parities, [size] * 4, 512)
    members = [make_member(code, n, size) for n in range(4)]
    results = succeed(4, lambda n, t: encoding.encode(code, members[n], t, range(4)))
    views = [make_lost(code), *map(protected, members[1:], results[1:])]
    passes = Passes(monkeypatch)
    succeed(4, lambda n, t: rebuild(code, views[n], t, range(4), {0}))
    assert np.array_equal(used_of(views[0], members[0]), used_of(members[0], members[0]))
    sums, solved_parity, rebuilt = 4, 1, 4
    most = (sums + solved_parity + rebuilt) * code.chunk_bytes
    # Blocks that data share with their tables are digested alone, and those behind them.
    behind = 4 * code.small_piece_bytes
    assert most - 4 * k * code.block_bytes <= passes.digested <= most + k * behind


@pytest.mark.parametrize("shape", [("xor", 1, 1), ("replica", 1, 2)])
def test_rebuilding_copies_computes_nothing(
    shape: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor's piece is what was lost: it is checked where it lies, and sent from there."""
    kind, k, parities = shape
    peers, size = range(k + parities), 64 << 10
    monkeypatch.setattr(member_module, "PIECE_BYTES", 8 << 10)
    code = make_code(kind, k, parities, [size] * len(peers), 512)
    members = [make_member(code, n, size) for n in peers]
    results = succeed(len(peers), lambda n, t: encoding.encode(code, members[n], t, peers))
    views = [make_lost(code), *map(protected, members[1:], results[1:])]
    monkeypatch.setattr(Codec, "kernel", None)
    succeed(len(peers), lambda n, t: rebuild(code, views[n], t, peers, {0}))
    assert np.array_equal(used_of(views[0], members[0]), used_of(members[0], members[0]))


def messages_of_encode(size: int) -> tuple[StripeCode, Counter[MessageKind]]:
    """What one member of rs:2+2 sends, by kind; all of them send alike."""
    code = make_code("rs", 2, 2, [size] * 4, 512)
    members, sent = [make_member(code, n, size) for n in range(4)], Counter[MessageKind]()

    def work(number: int, transport: Any) -> object:
        send = transport.isend
        if number == 1:
            transport.isend = lambda *words: (sent.update([kind_of(words[2])]), send(*words))[1]
        return encoding.encode(code, members[number], transport, range(4))

    succeed(4, work)
    return code, sent


def test_encoding_sends_whole_pieces_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message costs a call and a wait; what comes besides chunks is of no length."""
    monkeypatch.setattr(member_module, "PIECE_BYTES", 8 << 10)
    (_, few), (code, many) = messages_of_encode(32 << 10), messages_of_encode(128 << 10)
    pieces = -(-code.chunk_bytes // (8 << 10))
    assert pieces > 4 and (many[MessageKind.SOURCE], many[MessageKind.RESULT]) == (
        2 * pieces,
        pieces,
    )
    assert all(
        few[kind] == many[kind]
        for kind in (MessageKind.LENGTH, MessageKind.BODY, MessageKind.DIGEST)
    )


def test_members_need_not_keep_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member has more pieces on offer than it takes in at a time, before anybody took them."""
    code = make_code("rs", 2, 1, [12 << 10] * 3, 512)
    members = [make_member(code, n, 12 << 10) for n in range(3)]
    offered: Counter[int] = Counter()

    def work(number: int, transport: Any) -> object:
        result = encoding.encode(code, members[number], transport, range(3))
        offered[number] = transport.most_offered
        return result

    monkeypatch.setattr(member_module, "PIECE_BYTES", 512)
    succeed(3, work)
    assert min(offered.values()) > max(TURNS_EARLY + TURNS_LATE, EXCHANGES_IN_FLIGHT), offered


def test_sends_start_early_and_are_waited_for_late() -> None:
    started: list[int] = []

    def send(number: int) -> list[object]:
        started.append(number)
        return [number]

    ahead = Ahead(partial(send, number) for number in range(1, 41))
    for turn in range(1, 31):
        assert ahead.due() == ([turn - TURNS_LATE] if turn > TURNS_LATE else ())
        assert started == [*range(1, turn + TURNS_EARLY + 1)]
    assert ahead.rest() == [*range(31 - TURNS_LATE, 31 + TURNS_EARLY)]


@pytest.mark.parametrize("members", [2, 3, 8, 64])
def test_a_barrier_takes_few_messages(members: int) -> None:
    sent: Counter[int] = Counter()

    def work(number: int, transport: Any) -> bool:
        barrier(Link(transport, range(members), None))
        sent[number] = sum(transport.sent.values()) // 8
        return True

    succeed(members, work)
    assert set(sent.values()) == {(members - 1).bit_length()}
