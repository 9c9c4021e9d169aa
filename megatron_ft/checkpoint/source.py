"""Snapshots to read, in memory or on disk, as drain, export and verify use them.

A source is made by ``open_live`` (live.py) or ``open_checkpoint`` (load.py):

    source = open_live(root, job)
    with open_newest(source) as shards:
        for shard_id, shard in shards.items():
            ...  # shard.layout, shard.data, shard.objects
        shards.check()  # before what was made from them is given its final name
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import digest
from megatron_ft.core.errors import SnapshotUnavailableError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.shard import LayoutEntry, Meta, ShardLayout, unpack_meta

log = logging.getLogger(__name__)

MOST_TRIES = 16

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class SnapshotInfo:
    """One complete snapshot.  ``level`` is protected or local (in memory), durable (on disk)."""

    snapshot: SnapshotId
    iteration: int
    level: str


@dataclass(frozen=True)
class ShardBytes:
    """One shard whose digests have matched.

    ``data`` is the whole sealed region [0, ``record.used_bytes``), read-only; offsets in
    ``layout`` count from its start.  ``objects`` are the encoded small objects, ``form``
    what the training framework would save of this shard (see shard_meta.Meta).
    ``origin`` names the arena or file for messages.
    """

    record: SealedRecord
    data: NDArray[np.uint8]
    layout: ShardLayout
    objects: bytes
    form: bytes
    block_bytes: int
    origin: str

    def bytes_of(self, entry: LayoutEntry) -> NDArray[np.uint8]:
        """The stored bytes of one tensor of the layout, alias or not; a view of ``data``."""
        return self.data[entry.offset : entry.offset + entry.nbytes]


class OpenSnapshot(dict[str, ShardBytes]):
    """All shards of one snapshot by shard id, readable until the source's context ends.

    ``job`` and ``lineage`` say whose it is and what it descends from.
    """

    def __init__(
        self,
        info: SnapshotInfo,
        job: uuid.UUID,
        lineage: tuple[Ancestor, ...],
        shards: Mapping[str, ShardBytes],
        check: Callable[[], None],
    ) -> None:
        super().__init__(shards)
        self.info, self.job, self.lineage = info, job, lineage
        self.check = check
        """SnapshotUnavailableError if memory was reused since it was verified: what was read
        may then be anything.  Call it after the last read, before the result is published;
        the end of the context calls it too."""


@dataclass(frozen=True)
class ShardParts:
    """One shard of which only the bytes that are asked for are read and checked.

    ``read(start, stop)`` gives these bytes of the sealed region, offsets as in ``layout``; they are
    valid while the source is open.  It raises SnapshotUnavailableError if the blocks that hold them
    are damaged.
    """

    layout: ShardLayout
    read: Callable[[int, int], NDArray[np.uint8]]

    @classmethod
    def of(
        cls, record: SealedRecord, read: Callable[[int, int], NDArray[np.uint8]], origin: str
    ) -> ShardParts:
        """The shard of this record; SnapshotUnavailableError if it holds another layout."""
        meta = read(record.meta_offset, record.meta_offset + record.meta_bytes)
        return cls(_layout_of(record, unpack_meta(meta.tobytes()), origin), read)


class SnapshotSource(Protocol):
    """A place that holds snapshots of one job."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons of the last ``snapshots()`` against being complete, one sentence each."""

    def snapshots(self) -> list[SnapshotInfo]:
        """The snapshots that every shard is there of, newest first; none is an empty list."""

    def open(self, info: SnapshotInfo) -> AbstractContextManager[OpenSnapshot]:
        """Verify every byte of one snapshot and hold it until the context ends.

        SnapshotUnavailableError if a shard is missing or damaged, or the snapshot was given
        up meanwhile; the message names the shard and where it lies.
        """

    def open_parts(self, info: SnapshotInfo) -> AbstractContextManager[Mapping[str, ShardParts]]:
        """As ``open``, but only what is read of a shard is checked."""


@contextmanager
def open_newest(source: SnapshotSource, iteration: int | None = None) -> Iterator[OpenSnapshot]:
    """Open the newest snapshot that is whole, of ``iteration`` if one is given.

    One that turns out damaged, or was superseded before it could be held, costs a warning;
    then the newest is tried that was not yet.  SnapshotUnavailableError, with all reasons,
    if none can be opened.
    """
    with ExitStack() as opened:
        yield _enter_newest(source, iteration, lambda one: opened.enter_context(source.open(one)))


@contextmanager
def open_newest_parts(
    source: SnapshotSource, iteration: int | None = None
) -> Iterator[tuple[SnapshotInfo, Mapping[str, ShardParts]]]:
    """As open_newest, but damage is only found in what is read."""
    with ExitStack() as opened:
        yield _enter_newest(
            source, iteration, lambda one: (one, opened.enter_context(source.open_parts(one)))
        )


def _enter_newest(
    source: SnapshotSource, iteration: int | None, enter: Callable[[SnapshotInfo], Opened]
) -> Opened:
    reasons: list[str] = []
    tried: set[SnapshotId] = set()
    while (info := _newest(source, iteration, tried)) is not None and len(tried) < MOST_TRIES:
        tried.add(info.snapshot)
        try:
            return enter(info)
        except SnapshotUnavailableError as error:
            log.warning("iteration %d cannot be used: %s", info.iteration, error)
            reasons.append(str(error))
    which = "complete snapshot" if iteration is None else f"complete snapshot of {iteration}"
    reasons = reasons or list(source.problems) or ["nothing was committed yet"]
    raise SnapshotUnavailableError(f"{source} has no {which}: {'; '.join(reasons)}")


def _newest(
    source: SnapshotSource, iteration: int | None, tried: Collection[SnapshotId]
) -> SnapshotInfo | None:
    found = (
        info
        for info in source.snapshots()
        if iteration in (None, info.iteration) and info.snapshot not in tried
    )
    return next(found, None)


def verified_shard(
    data: NDArray[np.uint8],
    record: SealedRecord,
    block_bytes: int,
    origin: str,
) -> ShardBytes:
    """Check every byte of a sealed region, then ``take_apart``.

    ``data`` may be longer than the region.  SnapshotUnavailableError names the bad blocks.
    """
    bad = digest.verify_shard(data, record, block_bytes)
    if bad:
        raise SnapshotUnavailableError(describe_damage(record, bad, block_bytes, origin))
    return take_apart(data, record, block_bytes, origin)


def take_apart(
    data: NDArray[np.uint8],
    record: SealedRecord,
    block_bytes: int,
    origin: str,
) -> ShardBytes:
    """The parts of a sealed region whose bytes were checked; the objects are not decoded.

    SnapshotUnavailableError if it holds another layout than its record names.
    """
    meta = unpack_meta(digest.read_meta(data, record))
    layout = _layout_of(record, meta, origin)
    region = data[: record.used_bytes]
    return ShardBytes(record, region, layout, meta.nearest_objects, meta.form, block_bytes, origin)


def _layout_of(record: SealedRecord, meta: Meta, origin: str) -> ShardLayout:
    layout = ShardLayout.from_bytes(meta.layout)
    if layout.hash() != record.layout_hash or layout.tensor_bytes > record.meta_offset:
        raise SnapshotUnavailableError(
            f"shard {record.shard_id} in {origin} holds another layout than its record names"
        )
    return layout


def describe_damage(record: SealedRecord, bad: list[int], block_bytes: int, origin: str) -> str:
    """The damaged blocks of a shard as a sentence, for messages."""
    return (
        f"shard {record.shard_id} of snapshot {record.snapshot} in {origin}: {len(bad)} of its "
        f"blocks of {block_bytes} bytes do not match their digests ({digest.name_blocks(bad)})"
    )
