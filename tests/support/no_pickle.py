"""Looks through what a drained checkpoint holds beside tensors for a pickle, however wrapped."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.core.errors import UNREADABLE
from megatron_ft.core.objects import MAGIC


def check_holds_no_pickle(directory: Path) -> None:
    """Every piece of bytes in it is in our encoding or is no pickle, down to the innermost."""
    with open_newest(open_checkpoint(directory)) as shards:
        assert shards
        for shard_id, shard in shards.items():
            assert shard.objects.startswith(MAGIC), shard_id
            pieces = [*pieces_of(shard.objects), *pieces_of(shard.form)]
            assert len(pieces) >= 3, f"looked into {len(pieces)} pieces of {shard_id} only"
            for piece in pieces:
                assert not is_pickle(piece), f"{shard_id} holds a pickle: {piece[:80]!r}"


def pieces_of(data: bytes) -> Iterator[bytes]:
    """The bytes, and all bytes inside of them as far as they are encoded or compressed."""
    yield data
    try:
        yield from pieces_of(zlib.decompress(data))
    except zlib.error:
        pass
    try:
        content = msgspec.msgpack.decode(data[len(MAGIC) :] if data.startswith(MAGIC) else data)
    except UNREADABLE:
        return
    for leaf in _bytes_in(content):
        yield from pieces_of(leaf)


def _bytes_in(content: Any) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from _bytes_in(item)
    elif isinstance(content, dict):
        yield from _bytes_in([*content, *content.values()])


def is_pickle(data: bytes) -> bool:
    try:
        pickle.loads(data)
    except Exception:
        return False
    return True
