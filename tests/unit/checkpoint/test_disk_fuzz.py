"""Checkpoints of any content: a CheckpointDamagedError, or the bytes that were written."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena import digest
from megatron_ft.checkpoint import disk_format
from megatron_ft.checkpoint.disk_format import MANIFEST, Manifest
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import find, open_checkpoint
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.load import fill, read_manifest
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.core.errors import (
    ArenaError,
    CheckpointDamagedError,
    ConfigError,
    DrainError,
    LayoutMismatchError,
    MegatronFTError,
    SnapshotUnavailableError,
)
from megatron_ft.core.shard import ShardLayout, pack_meta, unpack_meta
from tests.support.disk_samples import BLOCK, Memory, layout, waiting

FOLDER = "iter_0000010-1.1-00000000"
SHARD_FILE = "dp0.safetensors"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
seeds = st.integers(0, (1 << 63) - 1)
some = settings(max_examples=EXAMPLES, deadline=None)
WORDS = (0, 1, 7, 0x7FFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    memory = Memory(tmp_path_factory.mktemp("memory"))
    memory.commit(1, 10)
    target = tmp_path_factory.mktemp("drains") / FOLDER
    with open_newest(open_live(memory.root, memory.job)) as shards:
        write_shards(shards, target)
        publish(target, shards.info, shards.job, shards.lineage, len(shards))
    return target


@pytest.fixture(scope="module")
def bad(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose files are written anew by every example."""
    folder = tmp_path_factory.mktemp("bad") / FOLDER
    folder.mkdir(mode=0o700)
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    return waiting(tmp_path_factory.mktemp("target"))


def content(folder: Path) -> dict[str, tuple[bytes, ShardLayout]]:
    with open_newest(open_checkpoint(folder)) as shards:
        return {s: (shard.data.tobytes(), shard.layout) for s, shard in shards.items()}


def damage(raw: bytes, random: Random) -> bytes:
    """Bytes flipped, cut, repeated, or replaced by numbers that claim too much."""
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.choice((random.randrange(64), random.randrange(len(raw))))
        if random.random() < 0.5:
            changed[at] ^= 1 << random.randrange(8)
        else:
            changed[at : at + 8] = struct.pack("<Q", random.choice(WORDS))
    cut = random.choice((None, None, None, 0, 7, random.randrange(len(raw))))
    return bytes(changed[:cut]) + random.choice((b"", b"", b"\0", raw[:100]))


def judge(good: Path, bad: Path, target: Memory) -> None:
    """Whatever reads it gives an error of ours, or what was written."""
    try:
        assert content(bad) == content(good)
    except (SnapshotUnavailableError, ConfigError, LayoutMismatchError):
        pass
    find(bad.parent)
    try:
        fill(target.path("dp0"), bad, "dp0", read_manifest(bad))
    except (CheckpointDamagedError, DrainError, KeyError) as error:
        assert not isinstance(error, KeyError) or error.args == ("dp0",)


@some
@given(seed=seeds)
def test_shards(good: Path, bad: Path, target: Memory, seed: int) -> None:
    """The header comes with a manifest that vouches for it in half of the cases."""
    random = Random(seed)
    raw = damage((good / SHARD_FILE).read_bytes(), random)
    (bad / SHARD_FILE).write_bytes(raw)
    manifest = read_manifest(good)
    if random.random() < 0.5:
        manifest = vouched(manifest, raw)
    (bad / MANIFEST).write_bytes(manifest.to_json())
    judge(good, bad, target)


def vouched(manifest: Manifest, raw: bytes) -> Manifest:
    """The manifest as somebody would have written it who wanted this shard to be taken."""
    length = min(struct.unpack("<Q", raw[:8].ljust(8, b"\0"))[0] + 8, len(raw))
    line = msgspec.structs.replace(
        manifest.shards["dp0"],
        bytes=len(raw),
        header_digest=disk_format.header_digest(raw[:length]),
    )
    return msgspec.structs.replace(manifest, shards={**manifest.shards, "dp0": line})


@some
@given(seed=seeds)
def test_headers_with_other_values(good: Path, bad: Path, target: Memory, seed: int) -> None:
    """A whole header, its numbers changed, with a manifest that vouches for it."""
    random = Random(seed)
    raw = (good / SHARD_FILE).read_bytes()
    start = disk_format.header_length(raw[:8], "")
    header = msgspec.json.decode(raw[8:start])
    own = msgspec.json.decode(header["__metadata__"]["shard"])
    header["__metadata__"]["shard"] = msgspec.json.encode(changed(own, random)).decode()
    text = msgspec.json.encode(header)
    padded = -(-(len(text) + 8) // 64) * 64 - 8
    raw = struct.pack("<Q", padded) + text.ljust(padded) + raw[start:]
    (bad / SHARD_FILE).write_bytes(raw)
    (bad / MANIFEST).write_bytes(vouched(read_manifest(good), raw).to_json())
    judge(good, bad, target)


def changed(value: Any, random: Random) -> Any:
    """The same structure with a few leaves replaced."""
    if isinstance(value, dict):
        return {name: changed(inner, random) for name, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, random) for inner in value]
    if random.random() > 0.15:
        return value
    return random.choice((-1, *WORDS, None, "", "x", "../x", [], {}, 1.5, "0" * 64))


@some
@given(seed=seeds)
def test_manifests(good: Path, bad: Path, target: Memory, seed: int) -> None:
    """Damaged ones, and others that are signed as they should be."""
    random = Random(seed)
    raw = (good / MANIFEST).read_bytes()
    (bad / SHARD_FILE).write_bytes((good / SHARD_FILE).read_bytes())
    if random.random() < 0.5:
        (bad / MANIFEST).write_bytes(damage(raw, random))
    else:
        values = changed(msgspec.json.decode(raw), random)
        try:
            signed = msgspec.convert(values, Manifest).to_json()
        except (msgspec.MsgspecError, TypeError):
            signed = msgspec.json.encode(values)
        (bad / MANIFEST).write_bytes(signed)
    judge(good, bad, target)


@some
@given(seed=seeds)
def test_regions_that_are_sealed_as_they_should_be(seed: int, good: Path) -> None:
    """Any meta and layout under matching digests: nothing outside the region is ever named."""
    random, shard = Random(seed), layout()
    packed = pack_meta(shard.to_bytes(), {"iteration": 1})
    if random.random() < 0.5:
        meta = damage(packed, random)
    else:
        values = changed(msgspec.msgpack.decode(shard.to_bytes()), random)
        meta = pack_meta(msgspec.msgpack.encode(values), {})
    try:
        found = ShardLayout.from_bytes(unpack_meta(meta).layout)
    except LayoutMismatchError:
        return
    for entry in found.entries:
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= found.tensor_bytes


@some
@given(seed=seeds)
def test_digest_tables_and_records(seed: int) -> None:
    """Records of any numbers over a region of any bytes: a list of bad blocks, or an error."""
    random = Random(seed)
    data = np.frombuffer(random.randbytes(8 * BLOCK), np.uint8).copy()
    record = digest.seal(
        data,
        shard_id="dp0",
        snapshot=(1, 1),  # type: ignore[arg-type]
        iteration=1,
        tensor_bytes=3000,
        meta=b"meta",
        layout_hash=bytes(32),
        block_bytes=BLOCK,
    )
    numbers = ("tensor_bytes", "meta_offset", "meta_bytes", "digest_offset", "used_bytes")
    other = {name: random.choice(WORDS) for name in numbers if random.random() < 0.4}
    forged = msgspec.structs.replace(record, **other)
    bad = digest.verify_shard(data, forged, BLOCK)
    assert bool(bad) == (forged != record)
    assert len(bad) <= data.size // BLOCK + 1
    for read in (digest.read_meta, digest.digest_table):
        try:
            assert np.size(np.asarray(read(data, forged))) <= data.size
        except ArenaError:
            pass


def test_a_manifest_that_is_longer_than_any(bad: Path, good: Path) -> None:
    (bad / MANIFEST).write_bytes((good / MANIFEST).read_bytes())
    os.truncate(bad / MANIFEST, 1 << 40)
    with pytest.raises(CheckpointDamagedError, match="more than"):
        read_manifest(bad)
    (bad / MANIFEST).write_bytes(b"[" * 1_000_000)
    with pytest.raises(MegatronFTError):
        read_manifest(bad)
