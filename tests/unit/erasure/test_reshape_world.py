"""Shards of a new layout, made by worlds of encoders out of those of an old one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.digest import read_meta, required_bytes, seal, verify_shard
from megatron_ft.core.errors import LayoutMismatchError, TransportError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.identity import shard_id as shard_name
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import (
    LogicalPlace,
    Piece,
    ShardLayout,
    TensorSpec,
    pack_meta,
    plan_layout,
    split_range,
    unpack_meta,
)
from megatron_ft.erasure import reshape as module
from megatron_ft.erasure.member import CorruptMemberError
from megatron_ft.erasure.reshape import HeldShard, NewShard, ReshapeResult, reshape
from megatron_ft.erasure.reshape_plan import MissingRangeError, origins_of, related
from megatron_ft.erasure.transport import EXCHANGES_IN_FLIGHT
from tests.support.erasure_samples import GARBAGE, ThreadWorld, WorldBroken

OLD, NEW = SnapshotId(1, 4), SnapshotId(2, 0)
BLOCK = 1024
ROOM = 4096
"""For small objects."""


class Shape(NamedTuple):
    """A parallel layout: ``rows`` cut tensors by rows, else by columns; ``owned`` by ranges."""

    tp: int
    dp: int
    rows: bool = True
    owned: bool = True


class Tensors(NamedTuple):
    """Tensors of a training: matrices that are sharded, and those that each place has alone."""

    matrices: dict[str, Any]
    buffer: Any
    replicated: Any
    step: Any


def tensors(sizes: tuple[tuple[int, int], ...] = ((12, 24), (24, 36))) -> Tensors:
    rng = np.random.default_rng(5)
    matrices = {f"w{i}": rng.random(size, np.float32) for i, size in enumerate(sizes)}
    return Tensors(matrices, rng.random(7), rng.random(50), np.array(3, np.float32))


class Shard(NamedTuple):
    layout: ShardLayout
    values: dict[str, Any]


def shards(held: Tensors, shape: Shape) -> dict[str, Shard]:
    return {
        shard_name(tp=tp, dp=dp): one_shard(held, shape, tp, dp)
        for tp in range(shape.tp)
        for dp in range(shape.dp)
    }


def one_shard(held: Tensors, shape: Shape, tp: int, dp: int) -> Shard:
    specs, values = [], {}

    def add(name: str, value: Any, logical: LogicalPlace | None, **more: Any) -> None:
        kind, bytes_ = str(value.dtype), value.itemsize
        specs.append(TensorSpec(name, kind, bytes_, value.shape, logical=logical, **more))
        values[name] = value

    for name, whole in held.matrices.items():
        axis = 0 if shape.rows else 1
        first, stop = split_range(whole.shape[axis], tp, shape.tp)
        local = np.ascontiguousarray(whole[first:stop] if shape.rows else whole[:, first:stop])
        offset = (first, 0) if shape.rows else (0, first)
        piece = Piece(name, whole.shape, offset, local.shape, 0, (local.shape[1], 1))
        if shape.owned:
            start, end = split_range(local.size, dp, shape.dp)
            place = LogicalPlace(start, local.size, (piece,))
            add(f"{name}.main", local.reshape(-1)[start:end], place)
        else:
            add(f"{name}.main", local, LogicalPlace(0, local.size, (piece,)))
    step = Piece("step", (), (), (), 0, ())
    add("step", held.step, LogicalPlace(0, 1, (step,)))
    if shape.tp == 1:
        add("buffer", held.buffer, None)
        add("replicated", held.replicated, None, split=(dp, shape.dp))
    return Shard(plan_layout(specs), values)


def sealed(name: str, shard: Shard) -> HeldShard:
    layout = shard.layout
    data = np.zeros(required_bytes(layout.tensor_bytes, ROOM, BLOCK), np.uint8)
    for entry in layout.entries:
        part = shard.values[entry.name].reshape(-1)[entry.start : entry.stop]
        data[entry.offset : entry.offset + entry.nbytes] = part.view(np.uint8)
    record = seal(
        data,
        shard_id=name,
        snapshot=OLD,
        iteration=40,
        tensor_bytes=layout.tensor_bytes,
        meta=pack_meta(layout.to_bytes(), {"who": name}),
        layout_hash=layout.hash(),
        block_bytes=BLOCK,
    )
    return HeldShard(record, data, BLOCK)


def room(shard: Shard) -> NewShard:
    size = required_bytes(shard.layout.tensor_bytes, 2 * ROOM, BLOCK)
    return NewShard(shard.layout, b"form", np.full(size, GARBAGE, np.uint8), BLOCK)


def spread(names: Mapping[str, Any], ranks: int, seed: int = 0) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    return {name: int(rng.integers(ranks)) for name in names}


class Outcome(NamedTuple):
    results: list[Any]
    new: dict[str, NewShard]
    transports: list[Any]


def run(
    old: Mapping[str, HeldShard], wanted: Mapping[str, Shard], ranks: int, seed: int = 0
) -> Outcome:
    places, homes = spread(old, ranks, seed), spread(wanted, ranks, seed + 1)
    new = {name: room(shard) for name, shard in wanted.items()}
    transports: list[Any] = []

    def work(rank: int, transport: Any) -> dict[str, ReshapeResult]:
        transports.append(transport)
        held = {name: old[name] for name, at in places.items() if at == rank}
        mine = {name: new[name] for name, at in homes.items() if at == rank}
        return reshape(transport, places, held, mine, snapshot=NEW, iteration=40)

    return Outcome(ThreadWorld(ranks).run(work), new, transports)


def check(outcome: Outcome, wanted: Mapping[str, Shard]) -> None:
    done = {name: one for result in outcome.results for name, one in result.items()}
    assert done.keys() == wanted.keys()
    for name, shard in wanted.items():
        record, data = done[name].record, outcome.new[name].data
        assert (record.shard_id, record.snapshot, record.iteration) == (name, NEW, 40)
        assert not verify_shard(data, record, BLOCK)
        used = np.zeros(record.tensor_bytes, bool)
        for entry in shard.layout.entries:
            stop = entry.offset + entry.nbytes
            used[entry.offset : stop] = True
            part = shard.values[entry.name].reshape(-1)[entry.start : entry.stop]
            assert data[entry.offset : stop].tobytes() == part.tobytes(), (name, entry.name)
        assert not data[: record.tensor_bytes][~used].any(), "gaps are zero"
        meta = unpack_meta(read_meta(data, record))
        assert (meta.layout, meta.form) == (shard.layout.to_bytes(), b"form")
        assert done[name].bytes_needed == used.sum()


SHAPES = st.builds(
    Shape, st.sampled_from([1, 2, 3]), st.integers(1, 4), st.booleans(), st.booleans()
)


@given(old=SHAPES, new=SHAPES, ranks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_any_layout_is_made_of_any_other(old: Shape, new: Shape, ranks: int, seed: int) -> None:
    """Tensors without a logical place need one model-parallel place in both layouts."""
    held = tensors()
    if (old.tp == 1) != (new.tp == 1):
        old = old._replace(tp=2)
        new = new._replace(tp=3)
    before = {name: sealed(name, shard) for name, shard in shards(held, old).items()}
    wanted = shards(held, new)
    check(run(before, wanted, ranks, seed), wanted)


@pytest.mark.parametrize("piece_bytes", [64, 1000])
def test_pieces_are_bounded_and_few_are_in_flight(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    held = tensors()
    old, new = Shape(2, 2), Shape(3, 1, rows=False)
    before = {name: sealed(name, shard) for name, shard in shards(held, old).items()}
    wanted = shards(held, new)
    outcome = run(before, wanted, 3)
    check(outcome, wanted)
    for transport in outcome.transports:
        assert transport.most_taken <= EXCHANGES_IN_FLIGHT
        assert transport.most_offered <= EXCHANGES_IN_FLIGHT


@pytest.mark.parametrize("swapped", [False, True])
def test_near_sources_are_preferred_and_bytes_of_far_ones_counted(swapped: bool) -> None:
    """Of replicas the one on the same rank serves; a part that only another has travels."""
    wanted = shards(tensors(), Shape(1, 2, owned=False))
    before = {name: sealed(name, shard) for name, shard in wanted.items()}
    first = next(iter(wanted))
    places = {name: (name != first) ^ swapped for name in before}

    def work(rank: int, transport: Any) -> dict[str, ReshapeResult]:
        theirs = {name: before[name] for name, at in places.items() if at == rank}
        mine = {first: room(wanted[first])} if rank == 0 else {}
        return reshape(transport, places, theirs, mine, snapshot=NEW, iteration=40)

    (done, _) = ThreadWorld(2).run(work)
    assert isinstance(done, dict)
    entries = wanted[first].layout.by_name()
    own = entries["replicated"].nbytes + entries["buffer"].nbytes
    assert done[first].bytes_received == (own if swapped else 0)


def test_a_shard_with_wrong_bytes_is_named_and_nothing_is_sealed() -> None:
    held = tensors()
    before = {name: sealed(name, shard) for name, shard in shards(held, Shape(1, 2)).items()}
    before["pp0-tp0-dp1-ep0"].data[5] ^= 1
    outcome = run(before, shards(held, Shape(1, 3)), 3)
    errors = [one for one in outcome.results if not isinstance(one, WorldBroken)]
    (error,) = [one for one in errors if isinstance(one, CorruptMemberError)]
    assert error.shard_id == "pp0-tp0-dp1-ep0"


def test_bytes_that_change_on_the_way_are_noticed() -> None:
    before = {n: sealed(n, shard) for n, shard in shards(tensors(), Shape(1, 2)).items()}
    wanted = shards(tensors(), Shape(1, 1))
    places = dict(zip(before, (0, 1), strict=True))

    def work(rank: int, transport: Any) -> Any:
        arrived: list[Any] = []

        def flip(kind: Any, buffer: Any) -> None:
            arrived.append(buffer)
            if rank == 0 and buffer.nbytes == wanted_bytes // 2:
                buffer[0] ^= 1

        transport.on_received = flip
        held = {name: before[name] for name, at in places.items() if at == rank}
        new = {name: room(shard) for name, shard in wanted.items()} if rank == 0 else {}
        return reshape(transport, places, held, new, snapshot=NEW, iteration=40)

    wanted_bytes = wanted["pp0-tp0-dp0-ep0"].layout.by_name()["w1.main"].nbytes
    error, _ = ThreadWorld(2).run(work)
    assert isinstance(error, TransportError) and "pieces from rank 1 arrived" in str(error)


def test_what_nobody_holds_is_named() -> None:
    held = tensors()
    before = {name: sealed(name, shard) for name, shard in shards(held, Shape(1, 3)).items()}
    del before["pp0-tp0-dp1-ep0"]
    (error,) = run(before, shards(held, Shape(1, 2)), 1).results
    assert isinstance(error, MissingRangeError) and "of pp0-tp0-dp0-ep0" in str(error)


def test_a_place_that_did_not_exist_has_nothing_of_its_own() -> None:
    """Bytes of another place would be wrong ones."""
    held = tensors()
    before = {name: sealed(name, s) for name, s in shards(held, Shape(2, 1)).items()}
    (error,) = run(before, shards(held, Shape(1, 2)), 1).results
    assert isinstance(error, MissingRangeError) and "buffer" in str(error)


def test_another_model_is_refused() -> None:
    before = {n: sealed(n, s) for n, s in shards(tensors(), Shape(1, 2)).items()}
    wider = shards(tensors(((12, 24), (24, 40))), Shape(1, 3))
    (error,) = run(before, wider, 1).results
    assert isinstance(error, LayoutMismatchError) and "w1 has the shape [24, 40]" in str(error)


def test_a_tensor_that_no_new_shard_has_is_refused() -> None:
    """It would be dropped: weights, or a part of the optimizer's state, of another model."""
    before = {n: sealed(n, s) for n, s in shards(tensors(), Shape(1, 2)).items()}
    fewer = tensors()
    del fewer.matrices["w1"]
    for error in run(before, shards(fewer, Shape(1, 3)), 2).results:
        assert isinstance(error, LayoutMismatchError | WorldBroken)
        assert isinstance(error, WorldBroken) or "only in the snapshot, w1 first" in str(error)


def test_small_objects_are_those_of_the_nearest_shard_and_the_first() -> None:
    held = tensors()
    before = {name: sealed(name, s) for name, s in shards(held, Shape(2, 3)).items()}
    wanted = shards(held, Shape(2, 2))
    outcome = run(before, wanted, 2)
    for result in outcome.results:
        for name, done in result.items():
            meta = unpack_meta(read_meta(outcome.new[name].data, done.record))
            assert list(meta.origins) == list(dict.fromkeys([name, "pp0-tp0-dp0-ep0"]))
            assert all(decode(raw) == {"who": who} for who, raw in meta.origins.items())
            assert decode(meta.nearest_objects) == {"who": name} and not meta.objects


def test_objects_pass_through_a_second_reshape() -> None:
    held = tensors()
    before = {name: sealed(name, s) for name, s in shards(held, Shape(2, 2)).items()}
    wanted = shards(held, Shape(2, 1))
    once = run(before, wanted, 1)
    between = {
        name: HeldShard(done.record, once.new[name].data, BLOCK)
        for name, done in once.results[0].items()
    }
    again = shards(held, Shape(2, 3))
    twice = run(between, again, 2)
    check(twice, again)
    (done,) = [r["pp0-tp1-dp2-ep0"] for r in twice.results if "pp0-tp1-dp2-ep0" in r]
    meta = unpack_meta(read_meta(twice.new["pp0-tp1-dp2-ep0"].data, done.record))
    assert list(meta.origins) == ["pp0-tp1-dp0-ep0", "pp0-tp0-dp0-ep0"]


def test_the_nearest_shards_of_one_place() -> None:
    old = [shard_name(tp=tp, dp=dp) for tp in range(2) for dp in range(11)]
    nearest = related(shard_name(tp=1, dp=10), old)
    assert nearest[0] == shard_name(tp=1, dp=10) and len(nearest) == 11
    assert related(shard_name(tp=1, dp=13), old)[:2] == (
        shard_name(tp=1, dp=2),
        shard_name(tp=1, dp=3),
    )
    assert related(shard_name(pp=1), old) == ()
    assert origins_of(shard_name(pp=1), old) == (shard_name(),)
    assert related("mine", ["mine", "other"]) == ("mine",)


def test_a_region_without_room_is_an_error() -> None:
    held = tensors()
    before = {name: sealed(name, s) for name, s in shards(held, Shape(1, 2)).items()}
    wanted = shards(held, Shape(1, 1))

    def work(rank: int, transport: Any) -> Any:
        small = room(wanted["pp0-tp0-dp0-ep0"])
        small = NewShard(small.layout, b"", small.data[: small.layout.tensor_bytes + 8], BLOCK)
        new = {"pp0-tp0-dp0-ep0": small}
        return reshape(transport, dict.fromkeys(before, 0), before, new, snapshot=NEW, iteration=4)

    (error,) = ThreadWorld(1).run(work)
    assert isinstance(error, Exception) and "its arena holds" in str(error)


def test_elements_of_any_size_are_moved() -> None:
    """Complex ones of 16 bytes, and a dtype of 3 bytes if there ever is one."""
    for item in (1, 2, 3, 4, 8, 16):
        data = np.arange(item * 12, dtype=np.uint8)
        part = module.Strided(item, (2, 3), (4 * item, item), item)
        rows = [data[item * at : item * (at + 3)].tobytes() for at in (1, 5)]
        assert part.view(data).tobytes() == b"".join(rows)
        assert sum(one.nbytes for one in part.pieces()) == part.nbytes == math.prod((6, item))
