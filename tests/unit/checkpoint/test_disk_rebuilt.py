"""Readers of a job's memory get lost and damaged shards back where parity suffices."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.core.errors import SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId
from tests.support.disk_samples import Memory, content

SHARDS = ("dp0", "dp1", "dp2", "dp3")
NEWEST = SnapshotId(1, 2)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path, shards=SHARDS, parity=2, width=3000)
    memory.protect(1, 10)
    memory.protect(2, 20)
    return memory


def require_newest(memory: Memory, level: str = "protected") -> None:
    """Every byte of iteration 20 is read."""
    source = open_live(memory.root, memory.job, shards=SHARDS)
    with open_newest(source) as shards:
        assert (shards.info.iteration, shards.info.level) == (20, level)
        assert sorted(shards) == sorted(SHARDS)
        for shard_id, shard in shards.items():
            assert not shard.data.flags.writeable
            for entry in shard.layout.entries:
                if not entry.alias_of:
                    stored = content(shard_id + entry.name, NEWEST, entry.nbytes)
                    assert bytes(shard.bytes_of(entry)) == stored.tobytes(), (shard_id, entry.name)


def test_any_nodes_that_parity_covers_may_be_lost(memory: Memory) -> None:
    kept = memory.root.with_name("kept")
    shutil.copytree(memory.root, kept)
    for lost in [*combinations(SHARDS, 1), *combinations(SHARDS, 2)]:
        shutil.rmtree(memory.root)
        shutil.copytree(kept, memory.root)
        for shard_id in lost:
            shutil.rmtree(memory.folder(shard_id))
        require_newest(memory)


def test_damage_in_every_shard_is_mended_where_no_row_has_too_much(memory: Memory) -> None:
    """Blocks of different rows: a shard's own right blocks count, damaged ones of others do not."""
    for number, shard_id in enumerate(SHARDS):
        memory.flip(shard_id, 2, at=1024 * number)
    before = {shard_id: memory.path(shard_id).read_bytes() for shard_id in SHARDS}
    require_newest(memory)
    assert before == {shard_id: memory.path(shard_id).read_bytes() for shard_id in SHARDS}


def test_a_lost_node_and_a_damaged_digest_table_are_mended_together(memory: Memory) -> None:
    shutil.rmtree(memory.folder("dp3"))
    with Arena.open(memory.path("dp1")) as arena:
        record = arena.slot(0).record
        assert record is not None
    memory.flip("dp1", 2, at=record.digest_offset)
    require_newest(memory)


def test_more_losses_than_parity_are_an_error_that_says_so(memory: Memory) -> None:
    for shard_id in SHARDS[:3]:
        shutil.rmtree(memory.folder(shard_id))
    source = open_live(memory.root, memory.job, shards=SHARDS)
    assert source.snapshots() == []
    assert "no arena of dp0, dp1, dp2" in source.problems[0]


def test_more_damage_than_parity_names_the_block_and_nothing_is_read(memory: Memory) -> None:
    """Data and parity of three shards are wrong in the newest, so the older snapshot is read."""
    for shard_id in SHARDS[:3]:
        with Arena.open(memory.path(shard_id)) as arena:
            arena.data(0, writable=True)[:] ^= np.uint8(1)
            arena.parity(0, writable=True)[:] ^= np.uint8(1)
    source = open_live(memory.root, memory.job, shards=SHARDS)
    with (
        pytest.raises(SnapshotUnavailableError, match="parity does not replace it: at block 0"),
        open_newest(source, 20),
    ):
        pass
    with open_newest(source) as shards:
        assert shards.info.iteration == 10


def test_a_snapshot_without_parity_is_not_invented(tmp_path: Path) -> None:
    memory = Memory(tmp_path, shards=SHARDS, parity=2)
    memory.commit(2, 20)
    shutil.rmtree(memory.folder("dp0"))
    source = open_live(memory.root, memory.job, shards=SHARDS)
    assert source.snapshots() == []
    assert any("not held by dp0" in problem for problem in source.problems)
