"""Reading snapshots from arenas: which are complete, and that wrong bytes never come out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotHeader, SlotState
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.source import SnapshotInfo, open_newest
from megatron_ft.core.errors import ConfigError, SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import ShardLayout
from tests.support.disk_samples import JOB, SHARDS, Memory, content


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path)
    memory.commit(1, 10)
    memory.commit(2, 20)
    return memory


def test_snapshots_are_listed_newest_first_and_hold_what_was_stored(memory: Memory) -> None:
    source = open_live(memory.root, memory.job)
    infos = source.snapshots()
    assert infos == [
        SnapshotInfo(SnapshotId(1, 2), 20, "local"),
        SnapshotInfo(SnapshotId(1, 1), 10, "local"),
    ]
    with source.open(infos[1]) as shards:
        assert sorted(shards) == list(SHARDS) and shards.job == JOB
        for shard_id, shard in shards.items():
            assert shard.layout == memory.layout and not shard.data.flags.writeable
            assert decode(shard.objects) == {"iteration": 10}
            for entry in shard.layout.entries:
                if not entry.alias_of:
                    stored = content(shard_id + entry.name, SnapshotId(1, 1), entry.nbytes)
                    assert bytes(shard.bytes_of(entry)) == stored.tobytes()
            entries = shard.layout.by_name()
            tied, weight = shard.bytes_of(entries["tied"]), shard.bytes_of(entries["weight"])
            assert bytes(tied) == bytes(weight[4:44])


def test_a_snapshot_that_one_shard_lacks_is_not_listed(memory: Memory) -> None:
    memory.commit_one("dp0", SnapshotId(1, 3), 30)
    source = open_live(memory.root, memory.job)
    assert [info.iteration for info in source.snapshots()] == [20]
    assert "snapshot 1.3 is not held by dp1" in source.problems


@pytest.mark.parametrize(
    ("states", "listed"),
    [
        ((SlotState.COMMITTED, SlotState.PROTECTED), True),
        ((SlotState.COMMITTED, SlotState.SEALED), True),
        ((SlotState.PROTECTED, SlotState.PROTECTED), True),
        ((SlotState.PROTECTED, SlotState.SEALED), False),
        ((SlotState.SEALED, SlotState.SEALED), False),
        ((SlotState.COMMITTED, SlotState.CAPTURING), False),
    ],
)
def test_only_what_can_become_committed_alone_is_listed(
    tmp_path: Path, states: tuple[SlotState, SlotState], listed: bool
) -> None:
    memory = Memory(tmp_path)
    for shard_id, state in zip(SHARDS, states, strict=True):
        memory.commit_one(shard_id, SnapshotId(1, 1), 10, state=state)
    assert bool(open_live(memory.root, memory.job).snapshots()) == listed


def test_a_snapshot_on_its_way_is_a_problem_only_where_nothing_else_is(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    source = open_live(memory.root, memory.job)
    memory.commit_one("dp0", SnapshotId(1, 2), 20, state=SlotState.SEALED)
    assert source.snapshots() == [] and source.problems == ("snapshot 1.2 is not committed",)
    memory.commit(1, 10)
    assert len(source.snapshots()) == 1 and source.problems == ()


def test_a_lost_node_is_named(memory: Memory) -> None:
    shutil.rmtree(memory.folder("dp1"))
    source = open_live(memory.root, memory.job)
    assert source.snapshots() == []
    with pytest.raises(SnapshotUnavailableError, match="no arena of dp1"), open_newest(source):
        pass


def test_a_shard_that_is_known_otherwise_is_missed(memory: Memory) -> None:
    source = open_live(memory.root, memory.job, shards=("dp0", "dp1", "dp2"))
    assert source.snapshots() == []
    assert "no arena of dp2" in source.problems[0]


def test_damage_is_named_and_the_older_snapshot_is_taken(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.flip("dp1", 2, at=5)
    source = open_live(memory.root, memory.job)
    newest = source.snapshots()[0]
    with pytest.raises(SnapshotUnavailableError, match=r"dp1 of snapshot 1\.2 in .*n1/dp1.arena"):
        with source.open(newest):
            pytest.fail("opened in spite of damage")
    with open_newest(source) as shards:
        assert shards.info.iteration == 10
    assert "iteration 20 cannot be used" in caplog.text
    memory.flip("dp0", 1)
    with pytest.raises(SnapshotUnavailableError, match="dp1.*dp0"), open_newest(source):
        pass


def test_an_iteration_can_be_asked_for(memory: Memory) -> None:
    source = open_live(memory.root, memory.job)
    with open_newest(source, 10) as shards:
        assert shards.info.snapshot == SnapshotId(1, 1)
    with pytest.raises(SnapshotUnavailableError, match="of 11"), open_newest(source, 11):
        pass


def test_reuse_of_a_slot_while_it_is_read_is_noticed(memory: Memory) -> None:
    source = open_live(memory.root, memory.job)
    with pytest.raises(SnapshotUnavailableError, match="given up in .*dp0.arena"):
        with open_newest(source) as shards:
            shards.check()
            with Arena.open(memory.path("dp0")) as arena:
                arena.write_slot(0, SlotHeader(SlotState.CAPTURING, SnapshotId(1, 3), 30))


def test_errors_of_the_reader_are_its_own(memory: Memory) -> None:
    with pytest.raises(KeyError, match="mine"):
        with open_newest(open_live(memory.root, memory.job)):
            raise KeyError("mine")


def test_a_damaged_arena_file_counts_as_missing(memory: Memory) -> None:
    memory.path("dp1").write_bytes(b"nonsense" * 4096)
    memory.path("dp1").chmod(0o600)
    source = open_live(memory.root, memory.job)
    assert source.snapshots() == []
    assert "dp1.arena" in source.problems[0]


class Misnamed(ShardLayout, frozen=True, array_like=True):
    """Sealed as another layout than it is."""

    def hash(self) -> bytes:
        return bytes(32)


def test_a_layout_that_is_not_the_one_of_the_record_is_refused(memory: Memory) -> None:
    layout = memory.layout
    memory.layout = Misnamed(layout.version, layout.tensor_bytes, layout.entries)
    memory.commit(3, 30)
    source = open_live(memory.root, memory.job)
    with pytest.raises(SnapshotUnavailableError, match="dp0 .*holds another layout than its rec"):
        with source.open(source.snapshots()[0]):
            pass


def test_an_unknown_job_is_refused(memory: Memory) -> None:
    with pytest.raises(ConfigError, match="no arenas of a job 'other'"):
        open_live(memory.root, "other")
