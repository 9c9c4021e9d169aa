"""Makes shards of a new layout out of those of an old one, between the encoders of a world.

All ranks learn the layouts of all old shards.  Each plans its own new shards and asks the others
for what it lacks.  Then, in round r, every rank sends to the one r behind it what that one asked
for, and takes in what it asked of the one r before it.  A block is verified by the rank that
reads it, before its first byte is used; digests of what was sent are compared behind it.  The
wait is always for the oldest transfer of a round, and all ranks have the same rounds, so no cycle
can form.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_ft.arena import digest
from megatron_ft.arena.digest import BlockCheck
from megatron_ft.core.errors import TransportError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.core.shard import Meta, ShardLayout, unpack_meta
from megatron_ft.erasure.member import CorruptMemberError
from megatron_ft.erasure.reshape_plan import Fill, OldTensors, names_of, origins_of
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    RESHAPE_TAG,
    Pending,
    Transport,
)

PIECE_BYTES = 1 << 20
"""Most that is sent in one message; a rank has a few of them in flight each way."""


@dataclass(frozen=True)
class HeldShard:
    """An old shard on this rank: ``data`` is its sealed region, read-only."""

    record: SealedRecord
    data: Bytes
    block_bytes: int


@dataclass(frozen=True)
class NewShard:
    """A shard to be made on this rank: ``data`` is the whole data region of its slot."""

    layout: ShardLayout
    form: bytes
    data: Bytes
    block_bytes: int


class ReshapeResult(NamedTuple):
    """A shard that was made: bytes of its tensors, and how many came from other ranks."""

    record: SealedRecord
    bytes_needed: int
    bytes_received: int


class Strided(NamedTuple):
    """Elements in a region: ``offset`` and ``stride`` are bytes."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    item: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item

    def view(self, region: Bytes) -> Any:
        """The elements as integers of their size, or as bytes that belong together."""
        kind = f"u{self.item}" if self.item in (1, 2, 4, 8) else f"V{self.item}"
        return np.ndarray(self.shape, kind, region.data, self.offset, self.stride)

    def pieces(self) -> Iterator[Strided]:
        """Parts of at most PIECE_BYTES, in row-major order."""
        if self.nbytes <= PIECE_BYTES:
            yield self
            return
        axis = next(a for a, size in enumerate(self.shape) if size > 1)
        row = self.nbytes // self.shape[axis]
        rows = max(1, PIECE_BYTES // row)
        for first in range(0, self.shape[axis], rows):
            size = min(rows, self.shape[axis] - first)
            shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
            part = self._replace(offset=self.offset + first * self.stride[axis], shape=shape)
            yield from part.pieces()


class _Wanted(NamedTuple):
    """A copy that a rank asks another one for: ``source`` lies in that one's ``shard_id``."""

    shard_id: str
    source: Strided


class _Copy(NamedTuple):
    """A copy into a new shard of this rank."""

    wanted: _Wanted
    new_id: str
    target: Strided


def reshape(
    transport: Transport,
    ranks: Mapping[str, int],
    held: Mapping[str, HeldShard],
    new: Mapping[str, NewShard],
    *,
    snapshot: SnapshotId,
    iteration: int,
) -> dict[str, ReshapeResult]:
    """Fill and seal the ``new`` shards of this rank; all ranks of the world call it together.

    ``ranks`` says where every old shard is, ``held`` are those on this rank.  The result is of
    ``snapshot``.  CorruptMemberError names an old shard with wrong bytes, LayoutMismatchError
    what no old shard holds; then nothing is sealed, and the world is unusable.
    """
    readers = {shard_id: _Reader(shard_id, one) for shard_id, one in held.items()}
    metas = _metas(transport, readers)
    layouts = {shard_id: ShardLayout.from_bytes(meta.layout) for shard_id, meta in metas.items()}
    tensors = OldTensors(layouts, ranks)
    tensors.require_wanted(_wanted_names(transport, new.values()))
    copies: list[list[_Copy]] = [[] for _ in range(transport.size)]
    for new_id, shard in new.items():
        for one in tensors.fills(new_id, shard.layout, transport.rank):
            copies[ranks[one.copy.source.shard_id]].append(_as_bytes(one, new_id))
    asked = _asked(transport, copies)
    regions = {new_id: shard.data for new_id, shard in new.items()}
    for step in range(transport.size):
        give, take = (transport.rank + step) % transport.size, (transport.rank - step)
        _Round(transport, readers, regions).run(give, asked[give], take % transport.size, copies)
        if step == transport.size // 2:
            reach("reshape.half")
    return {
        new_id: _sealed(new_id, shard, metas, copies, transport.rank, snapshot, iteration)
        for new_id, shard in new.items()
    }


class _Reader:
    """An old shard of this rank, whose blocks are verified once, before they are used."""

    def __init__(self, shard_id: str, held: HeldShard) -> None:
        self.data = held.data
        self._shard_id, self._held = shard_id, held
        self._check = BlockCheck(held.data, held.record, held.block_bytes)
        self._good = np.zeros(self._check.blocks, bool)

    def meta(self) -> Meta:
        """The layout and the small objects."""
        record = self._held.record
        self._require(digest.first_meta_block(record, self._held.block_bytes), self._check.blocks)
        return unpack_meta(digest.read_meta(self._held.data, record))

    def view(self, part: Strided) -> Any:
        """Verified elements."""
        last = sum((n - 1) * s for n, s in zip(part.shape, part.stride, strict=True))
        size, stop = self._held.block_bytes, part.offset + last + part.item
        self._require(part.offset // size, -(-stop // size))
        return part.view(self.data)

    def _require(self, first: int, stop: int) -> None:
        """CorruptMemberError unless these blocks are as they were sealed."""
        left = first + np.flatnonzero(~self._good[first:stop])
        if left.size and (bad := self._check.bad(int(left[0]), int(left[-1]) + 1)):
            raise CorruptMemberError(self._shard_id, "its data is not what was sealed", bad[0])
        self._good[first:stop] = True


def _metas(transport: Transport, readers: Mapping[str, _Reader]) -> dict[str, Meta]:
    """The meta of every old shard, in the order of their names."""
    mine = {shard_id: reader.meta() for shard_id, reader in readers.items()}
    found: dict[str, Meta] = {}
    for blob in _exchange(transport, [msgspec.msgpack.encode(mine)] * transport.size):
        found |= msgspec.msgpack.decode(blob, type=dict[str, Meta])
    return dict(sorted(found.items()))


def _wanted_names(transport: Transport, new: Iterable[NewShard]) -> set[str]:
    """Names of the tensors of all new shards, on all ranks."""
    mine = {name for shard in new for name in names_of(shard.layout)}
    blobs = _exchange(transport, [msgspec.msgpack.encode(mine)] * transport.size)
    return set().union(*(msgspec.msgpack.decode(blob, type=set[str]) for blob in blobs))


def _asked(transport: Transport, copies: Sequence[Sequence[_Copy]]) -> list[list[_Wanted]]:
    """Requests of each rank to this one, by rank; this one asks for its ``copies``."""
    lists = [msgspec.msgpack.encode([copy.wanted for copy in some]) for some in copies]
    asked = _exchange(transport, lists)
    return [msgspec.msgpack.decode(blob, type=list[_Wanted]) for blob in asked]


def _exchange(transport: Transport, blobs: Sequence[bytes]) -> list[bytes]:
    """Give each rank its blob; what each rank has for this one."""
    found = [b""] * transport.size
    found[transport.rank] = blobs[transport.rank]
    for step in range(1, transport.size):
        to, source = (transport.rank + step) % transport.size, (transport.rank - step)
        source %= transport.size
        length = np.zeros(8, np.uint8)
        sizes = np.frombuffer(len(blobs[to]).to_bytes(8, "little"), np.uint8)
        _swap(transport, sizes, to, length, source)
        body = np.empty(int.from_bytes(length.tobytes(), "little"), np.uint8)
        _swap(transport, np.frombuffer(blobs[to], np.uint8), to, body, source)
        found[source] = body.tobytes()
    return found


def _swap(transport: Transport, mine: Bytes, to: int, theirs: Bytes, source: int) -> None:
    transport.waitall(
        [
            transport.irecv(theirs, source, RESHAPE_TAG),
            transport.isend(mine, to, RESHAPE_TAG),
        ]
    )


def _as_bytes(one: Fill, new_id: str) -> _Copy:
    """A planned copy with offsets and strides in bytes of the regions."""
    copy, old, target = one.copy, one.copy.source.entry, one.target
    item = target.nbytes // (target.stop - target.start)
    source = Strided(
        old.offset + copy.source_offset * item,
        copy.shape,
        tuple(step * item for step in copy.source_stride),
        item,
    )
    place = Strided(
        target.offset + copy.offset * item,
        copy.shape,
        tuple(step * item for step in copy.stride),
        item,
    )
    return _Copy(_Wanted(copy.source.shard_id, source), new_id, place)


class _Round:
    """One round of transfers: to one rank and from one, piece by piece, a few in flight."""

    def __init__(
        self, transport: Transport, readers: Mapping[str, _Reader], regions: Mapping[str, Bytes]
    ) -> None:
        self._transport, self._readers, self._regions = transport, readers, regions
        self._flight: deque[tuple[list[Pending], Any, Any, Any]] = deque()
        self._sent, self._taken = list[int](), list[int]()

    def run(
        self, to: int, asked: Sequence[_Wanted], source: int, copies: Sequence[Sequence[_Copy]]
    ) -> None:
        """Send what ``to`` has asked for, and take from ``source`` the copies of this rank."""
        if to == self._transport.rank:
            for copy in copies[to]:
                reader = self._readers[copy.wanted.shard_id]
                pairs = zip(copy.wanted.source.pieces(), copy.target.pieces(), strict=True)
                for part, place in pairs:
                    np.copyto(place.view(self._regions[copy.new_id]), reader.view(part))
            return
        sends = (
            self._readers[wanted.shard_id].view(part)
            for wanted in asked
            for part in wanted.source.pieces()
        )
        takes = (
            place.view(self._regions[copy.new_id])
            for copy in copies[source]
            for place in copy.target.pieces()
        )
        while True:
            out, home = next(sends, None), next(takes, None)
            if out is None and home is None:
                break
            self._settle(EXCHANGES_IN_FLIGHT - 1)
            self._start(out, to, home, source)
        self._settle(0)
        self._compare(to, source)

    def _compare(self, to: int, source: int) -> None:
        """TransportError if a piece has arrived with other bytes than were sent."""
        mine, theirs = np.array(self._sent, np.uint64), np.zeros(len(self._taken), np.uint64)
        _swap(self._transport, mine.view(np.uint8), to, theirs.view(np.uint8), source)
        wrong = np.flatnonzero(theirs != np.array(self._taken, np.uint64))
        if wrong.size:
            raise TransportError(
                f"{wrong.size} of {theirs.size} pieces from rank {source} arrived with other bytes "
                "than were sent: look for a fault of the network or of memory"
            )

    def _start(self, out: Any, to: int, home: Any, source: int) -> None:
        started: list[Pending] = []
        sent = buffer = None
        if home is not None:
            buffer = _flat(home) if home.flags.c_contiguous else np.empty(home.nbytes, np.uint8)
            started.append(self._transport.irecv(buffer, source, RESHAPE_TAG))
        if out is not None:
            sent = _flat(np.ascontiguousarray(out))
            self._sent.append(digest.digest_block(sent))
            started.append(self._transport.isend(sent, to, RESHAPE_TAG))
        self._flight.append((started, sent, buffer, home))

    def _settle(self, count: int) -> None:
        while len(self._flight) > count:
            pending, _, buffer, home = self._flight.popleft()
            self._transport.waitall(pending)
            if buffer is None:
                continue
            self._taken.append(digest.digest_block(buffer))
            if not home.flags.c_contiguous:
                np.copyto(home, buffer.view(home.dtype).reshape(home.shape))


def _flat(array: Any) -> Bytes:
    """The bytes of a contiguous array, in its memory."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def _sealed(
    new_id: str,
    shard: NewShard,
    metas: Mapping[str, Meta],
    copies: Sequence[Sequence[_Copy]],
    rank: int,
    snapshot: SnapshotId,
    iteration: int,
) -> ReshapeResult:
    """Write what no copy fills, and the digests."""
    layout, data = shard.layout, shard.data
    end = 0
    for entry in sorted(layout.entries, key=lambda one: one.offset):
        if not entry.alias_of:
            data[end : entry.offset] = 0
            end = max(end, entry.offset + entry.nbytes)
    data[end : layout.tensor_bytes] = 0
    origins = dict[str, bytes]()
    for old in origins_of(new_id, list(metas)):
        origins |= metas[old].origins or {old: metas[old].objects}
    meta = Meta(layout.to_bytes(), b"", shard.form, origins)
    record = digest.seal(
        data,
        shard_id=new_id,
        snapshot=snapshot,
        iteration=iteration,
        tensor_bytes=layout.tensor_bytes,
        meta=msgspec.msgpack.encode(meta),
        layout_hash=layout.hash(),
        block_bytes=shard.block_bytes,
    )
    sizes = [
        (source == rank, copy.target.nbytes)
        for source, some in enumerate(copies)
        for copy in some
        if copy.new_id == new_id
    ]
    received = sum(size for here, size in sizes if not here)
    return ReshapeResult(record, sum(size for _, size in sizes), received)
