"""Which drained checkpoint is taken, and loading one shard of it into an arena."""

from __future__ import annotations

import asyncio
import errno
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import verify_shard
from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.decide import Decision
from megatron_ft.checkpoint.disk_format import DiskCalls, Manifest, ShardFile, folder_name
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import DiskCriteria, Drained, choose, find, of_one_job
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.load import fill, read_manifest
from megatron_ft.checkpoint.native import TRACKER, iteration_of
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import CheckpointDamagedError, ConfigError, DrainError
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId, on_lineage
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor import disk_restore
from megatron_ft.supervisor.disk_restore import DiskRestores
from megatron_ft.supervisor.job_state import JobRecord
from megatron_ft.supervisor.spec import JobSpec
from tests.support.disk_samples import BLOCK, JOB, SHARDS, Memory, waiting

SEATS = {shard: ShardPlacement(rank, (), 5000) for rank, shard in enumerate(SHARDS)}


def drained(
    snapshot: SnapshotId, iteration: int, seats: dict[str, ShardPlacement] | None = None
) -> Drained:
    places = SEATS if seats is None else seats
    lines = {s: ShardFile(s, 100, "", "", places.get(s)) for s in SHARDS}
    manifest = Manifest(1, JOB, snapshot, iteration, "local", (), "", lines)
    return Drained(Path(f"/d/{snapshot}"), manifest)


snapshots = st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 4))
checkpoints = st.dictionaries(snapshots, st.integers(1, 9), max_size=6).map(
    lambda drawn: [drained(snapshot, iteration) for snapshot, iteration in drawn.items()]
)
lineages = st.tuples(st.none() | snapshots, st.none() | snapshots).map(
    lambda parents: (Ancestor(1, None), Ancestor(2, parents[0]), Ancestor(3, parents[1]))
)


@given(checkpoints, lineages, st.none() | snapshots, st.integers(-1, 9), st.booleans())
@settings(derandomize=True, deadline=None)
def test_the_newest_on_the_lineage_is_taken_unless_something_else_is_newer(
    found: list[Drained],
    lineage: tuple[Ancestor, ...],
    memory: SnapshotId | None,
    own: int,
    refuse: bool,
) -> None:
    refused = [found[0].folder] if refuse and found else []
    choice = choose(found, DiskCriteria(2, lineage, memory, own, refused))
    allowed = {
        one.manifest.snapshot
        for one in found
        if on_lineage(one.manifest.snapshot, lineage)
        and one.folder not in refused
        and (memory is None or one.manifest.snapshot > memory)
        and one.manifest.iteration >= own
    }
    taken = None if choice.taken is None else choice.taken.manifest.snapshot
    assert taken == max(allowed, default=None)
    newer = [
        one.folder.name
        for one in found
        if one.manifest.snapshot > (taken or memory or SnapshotId(0, 0))
    ]
    assert [reason.split()[0] for reason in choice.reasons] == sorted(newer, reverse=True)


def test_shape_and_seats_must_be_those_of_the_job() -> None:
    lineage = (Ancestor(1, None),)
    one = drained(SnapshotId(1, 1), 5)
    assert choose([one], DiskCriteria(2, lineage)).taken is one
    assert choose([one], DiskCriteria(3, lineage)).taken is one, "it is reshaped"
    older = SnapshotId(1, 0)
    beside = choose([one], DiskCriteria(3, lineage, older))
    assert "has 2 shards, the job 3" in beside.reasons[0], "memory would be given up for it"
    nobody = drained(SnapshotId(1, 1), 5, {})
    assert "only be exported" in choose([nobody], DiskCriteria(2, lineage)).reasons[0]
    assert one.slot_bytes == {"dp0": 5000, "dp1": 5000}


def test_what_is_objected_to_is_passed_over() -> None:
    found = [drained(SnapshotId(1, sequence), 10 * sequence) for sequence in (1, 2, 3)]
    wanted = DiskCriteria(
        2,
        (Ancestor(1, None),),
        reason_against=lambda snapshot, iteration: f"{snapshot} is bad" if iteration >= 20 else "",
    )
    choice = choose(found, wanted)
    assert choice.taken is found[0]
    assert choice.reasons == ("1.3 is not used: 1.3 is bad", "1.2 is not used: 1.2 is bad")


def test_a_lineage_that_nobody_knows_is_the_one_of_the_newest_incarnation() -> None:
    lines = drained(SnapshotId(1, 9), 9).manifest
    old = Manifest(**{**_fields(lines), "lineage": (Ancestor(1, None),)})
    rolled = (Ancestor(1, None), Ancestor(2, SnapshotId(1, 3)))
    new = Manifest(**{**_fields(lines), "lineage": rolled, "snapshot": SnapshotId(2, 1)})
    found = [Drained(Path("/old"), old), Drained(Path("/new"), new)]
    assert choose(found, DiskCriteria(2)).taken is found[1]
    refused = choose(found, DiskCriteria(2, refused=[Path("/new")]))
    assert refused.taken is None and "off the job's lineage" in refused.reasons[1]


def _fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


def test_the_iteration_of_a_frameworks_own_checkpoint_is_in_its_name() -> None:
    names = {"iter_0000120": 120, "release": -1, "global_step40": 40, "v2_best": -1}
    assert {name: iteration_of(Path("x") / name) for name in names} == names


# On a real disk.


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "shm")
    memory.commit(1, 10)
    return memory


@pytest.fixture
def folder(memory: Memory, tmp_path: Path) -> Path:
    return stored(memory, tmp_path)


def stored(memory: Memory, tmp_path: Path) -> Path:
    """The snapshot of iteration 10 on disk."""
    with open_newest(open_live(memory.root, memory.job)) as shards:
        folder = tmp_path / "disk" / folder_name(JOB, 10, shards.info.snapshot)
        write_shards(shards, folder, seats=SEATS)
        publish(folder, shards.info, JOB, shards.lineage, len(shards))
    return folder


def test_a_shard_comes_back_as_it_was(memory: Memory, folder: Path, tmp_path: Path) -> None:
    (one,) = find(folder.parent, JOB)[0]
    assert one.seats == SEATS
    new = waiting(tmp_path / "new")
    for shard in SHARDS:
        record = fill(new.path(shard), folder, shard, one.manifest)
        with Arena.open(new.path(shard)) as arena, Arena.open(memory.path(shard)) as old:
            assert verify_shard(arena.data(1), record, BLOCK) == []
            used = record.used_bytes
            assert np.array_equal(arena.data(1)[:used], old.data(1)[:used])
            assert arena.slot(1).state == SlotState.REBUILDING, "only the SMP writes headers"


def test_an_arena_with_other_digests_is_refused(folder: Path, tmp_path: Path) -> None:
    new = waiting(tmp_path / "new", block_bytes=4096)
    with pytest.raises(
        CheckpointDamagedError, match=r"dp0\.safetensors has digests .*: export the"
    ):
        fill(new.path("dp0"), folder, "dp0", read_manifest(folder))
    with Arena.open(new.path("dp0")) as arena:
        assert (arena.data(1) == 0xFF).all()


def test_a_slot_that_waits_for_something_else_is_not_written(folder: Path, tmp_path: Path) -> None:
    new = waiting(tmp_path / "new", sequence=2)
    with pytest.raises(DrainError, match=r"no slot of .*dp0\.arena waits for snapshot 1\.1"):
        fill(new.path("dp0"), folder, "dp0", read_manifest(folder))
    with Arena.open(new.path("dp0")) as arena:
        assert (arena.data(1) == 0xFF).all()


class BadSector(DiskCalls):
    """Reads fail from a certain offset on, as the kernel says it."""

    def __init__(self, at: int, number: int = errno.EIO) -> None:
        self.at, self.number = at, number

    def read(self, descriptor: int, buffer: memoryview, at: int) -> int:
        if at + len(buffer) > self.at:
            raise OSError(self.number, "from the disk")
        return super().read(descriptor, buffer, at)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("at", [0, 64, 2000])
def test_a_sector_that_cannot_be_read_is_an_error_with_a_name(
    folder: Path, tmp_path: Path, at: int, number: int
) -> None:
    new = waiting(tmp_path / "new")
    with pytest.raises(CheckpointDamagedError, match=r"dp0 cannot be read from .*dp0\.safet"):
        fill(new.path("dp0"), folder, "dp0", read_manifest(folder), BadSector(at, number))


def test_damage_is_found_after_the_bytes_were_copied(folder: Path, tmp_path: Path) -> None:
    path = folder / "dp1.safetensors"
    new, manifest = waiting(tmp_path / "new"), read_manifest(folder)
    raw = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(raw), 50):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 8]) + raw[at + 1 :])
        with pytest.raises(CheckpointDamagedError, match=r"dp1\.safetensors"):
            fill(new.path("dp1"), folder, "dp1", manifest)
    path.write_bytes(raw[:-1])
    assert find(folder.parent, JOB)[0] == []
    assert "dp1.safetensors has" in find(folder.parent, JOB)[1][0]


def test_a_job_that_drains_beside_the_one_it_started_from_can_be_started_again(
    memory: Memory, folder: Path
) -> None:
    other = uuid.UUID(int=1 << 127)
    with open_newest(open_live(memory.root, memory.job)) as shards:
        mine = folder.parent / folder_name(other, 10, shards.info.snapshot)
        mine.mkdir()
        lines = {s: ShardFile(s, 1, "", "") for s in SHARDS}
        for line in lines.values():
            (mine / line.file).write_bytes(b"x")
        manifest = Manifest(1, other, shards.info.snapshot, 10, "local", (), "", lines)
        (mine / "manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(ConfigError, match="checkpoints of 2 jobs"):
        of_one_job(folder.parent)
    assert [one.folder for one in of_one_job(folder.parent, other)] == [folder]
    assert [one.folder for one in of_one_job(mine, other)] == [mine]


def test_what_cannot_be_looked_at_is_a_reason_and_no_exception(
    folder: Path, tmp_path: Path
) -> None:
    found, problems = find(tmp_path / "gone")
    assert not found and "cannot be read: No such file" in problems[0]
    (folder / "dp0.safetensors").unlink()
    assert "cannot be read: No such file" in find(folder.parent)[1][0]
    assert find(folder.parent, uuid.UUID(int=1 << 127)) == ([], [])
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        of_one_job(folder)
    with pytest.raises(ConfigError, match="no whole checkpoint.*No such file"):
        of_one_job(folder.parent)


def restores(tmp_path: Path, own: Path | None = None) -> DiskRestores:
    spec = JobSpec(
        name="job",
        command=("true",),
        nodes=2,
        settings=SnapshotConfig(
            protect="none", drain_dir=tmp_path / "disk", drain_interval=1, checkpoint_dir=own
        ),
    )
    return DiskRestores(spec, VirtualCluster("job", ["n0", "n1"], tmp_path / "root"))


NOTHING = Decision(None, -1, False, (), {})
RECORD = JobRecord(2, "job", JOB, 0, b"", lineage=(Ancestor(1, None),))


def test_a_disk_that_hangs_or_fails_costs_its_checkpoints_and_not_the_recovery(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = restores(tmp_path)
    taken = asyncio.run(disk.look(NOTHING, RECORD)).taken
    assert taken is not None and taken.folder == folder
    answer = threading.Event()
    monkeypatch.setattr(disk_restore, "find", lambda *_: answer.wait(60))
    monkeypatch.setattr(disk_restore, "LOOK_TIMEOUT_SECONDS", 0.05)
    choice = asyncio.run(disk.look(NOTHING, RECORD))
    answer.set()
    assert choice.taken is None and "did not answer within" in choice.reasons[0]

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(disk_restore, "LOOK_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(disk_restore, "find", stale)
    assert "Stale file handle" in asyncio.run(disk.look(NOTHING, RECORD)).reasons[0]


def test_a_newer_checkpoint_of_the_framework_wins(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    for iteration, taken in ((9, True), (10, True), (11, False)):
        (own / f"iter_{iteration:07d}").mkdir(parents=True)
        (own / f"iter_{iteration:07d}" / "data").touch()
        (own / TRACKER).write_text(str(iteration))
        choice = asyncio.run(restores(tmp_path, own).look(NOTHING, RECORD))
        assert (choice.taken is not None) == taken, choice
    assert "older than the framework's own checkpoint of 11" in choice.reasons[0]


def test_a_folder_of_the_framework_that_cannot_be_read_costs_nothing_that_was_drained(
    folder: Path, tmp_path: Path
) -> None:
    disk = restores(tmp_path, tmp_path / ("x" * 300))
    choice = asyncio.run(disk.look(NOTHING, RECORD))
    assert choice.taken is not None and choice.taken.folder == folder
    assert "xxx cannot be read: File name too long" in choice.reasons[-1]
