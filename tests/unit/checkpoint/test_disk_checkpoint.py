"""Checkpoints: what stock tools see, what damage is found, and what a crash leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from megatron_ft.checkpoint import disk_format as mf
from megatron_ft.checkpoint.disk_format import folder_name
from megatron_ft.checkpoint.drain import DrainPlan, finish, publish, tidy, write_shards
from megatron_ft.checkpoint.drained import clean_up, clear_unfinished, open_checkpoint, superfluous
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.load import read_manifest
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli import drain as drain_command
from megatron_ft.cli import main as cli
from megatron_ft.core import private_files
from megatron_ft.core.background import Pace
from megatron_ft.core.errors import (
    CheckpointDamagedError,
    ConfigError,
    DrainError,
    SnapshotUnavailableError,
)
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.core.objects import decode
from tests.support.disk_drains import Recorder, drain, killed, newest_of, same, suicide
from tests.support.disk_samples import JOB, Memory


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "shm")
    memory.commit(1, 10)
    memory.commit(2, 20)
    return memory


def test_a_checkpoint_gives_back_what_the_arenas_hold(memory: Memory, tmp_path: Path) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    live = open_live(memory.root, memory.job)
    with open_newest(live) as shards, open_newest(open_checkpoint(folder)) as stored:
        assert same(shards, stored) and stored.lineage == shards.lineage and stored.job == JOB
        assert stored.info.level == "durable" and stored.info.iteration == 20
        assert stored["dp0"].layout == memory.layout
        assert decode(stored["dp1"].objects) == {"iteration": 20}
        assert not stored["dp0"].data.flags.writeable
    assert sorted(p.name for p in folder.iterdir()) == [
        "dp0.safetensors",
        "dp1.safetensors",
        "manifest.json",
    ]


def test_publishing_removes_nothing_and_tidying_what_is_superfluous(
    memory: Memory, tmp_path: Path
) -> None:
    older = drain(memory, tmp_path / "disk", 10)
    with open_newest(open_live(memory.root, memory.job)) as shards:
        plan = DrainPlan(
            job=JOB,
            snapshot=shards.info.snapshot,
            iteration=20,
            level="protected",
            lineage=shards.lineage,
            directory=tmp_path / "disk",
            shard_count=len(shards),
            keep=1,
        )
        write_shards(shards, plan.folder)
    finish(plan)
    finish(plan)
    assert mf.is_complete(older) and mf.is_complete(plan.folder)
    tidy(plan)
    assert list((tmp_path / "disk").iterdir()) == [plan.folder]


def test_stock_safetensors_reads_every_tensor(memory: Memory, tmp_path: Path) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    with open_newest(open_live(memory.root, memory.job)) as shards:
        shard = shards["dp1"]
        stored = {e.name: shard.bytes_of(e).tobytes() for e in shard.layout.entries}
        metadata = shard.data[shard.record.meta_offset :][: shard.record.meta_bytes].tobytes()
    path = folder / "dp1.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        names = {name for name in file.keys() if not name.startswith("__megatron_ft__.gap")}
        assert names == {
            *{"weight", "half", "part", "empty", "flag", "spectrum"},
            *{"__megatron_ft__.meta", "__megatron_ft__.digests"},
        }
        for name in names & stored.keys():
            tensor = file.get_tensor(name)
            raw = b"" if not tensor.numel() else _bytes(tensor)
            assert raw == stored[name], name
        assert list(file.get_slice("weight").get_shape()) == [100, 3]
        assert list(file.get_slice("part").get_shape()) == [6]
    arrays = safetensors.numpy.load_file(_without_bfloat16(path))
    assert arrays["weight"].tobytes() == stored["weight"]
    assert arrays["__megatron_ft__.meta"].tobytes() == metadata


def _bytes(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _without_bfloat16(path: Path) -> Path:
    """NumPy has no bfloat16, whoever wrote the file: the same bytes under another name."""
    raw = path.read_bytes()
    changed = raw.replace(b'{"dtype":"BF16","shape":[7]', b'{"dtype":"F16" ,"shape":[7]')
    assert changed != raw and len(changed) == len(raw)
    copy = path.parent.parent / "numpy.safetensors"
    copy.write_bytes(changed)
    return copy


# Damage.


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def cut(path: Path, length: int) -> None:
    os.truncate(path, path.stat().st_size - length)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "first byte": ("dp1.safetensors", lambda p: flip(p, 0), "dp1.safetensors"),
    "high byte of the length": ("dp1.safetensors", lambda p: flip(p, 7), "dp1.safetensors"),
    "header": ("dp1.safetensors", lambda p: flip(p, 30), "header of .*dp1.safetensors"),
    "padding of the header": ("dp1.safetensors", lambda p: flip(p, _start(p) - 1), "header of"),
    "tensor": ("dp1.safetensors", lambda p: flip(p, _start(p)), "dp1 .*do not match"),
    "digests": ("dp1.safetensors", lambda p: flip(p, -1), "dp1 .*do not match"),
    "cut by one": ("dp1.safetensors", lambda p: cut(p, 1), "dp1.safetensors has"),
    "empty": ("dp1.safetensors", lambda p: os.truncate(p, 0), "dp1.safetensors has 0 bytes"),
    "gone": ("dp1.safetensors", lambda p: p.unlink(), "dp1.safetensors"),
    "other shard": (
        "dp1.safetensors",
        lambda p: shutil.copy(p.with_name("dp0.safetensors"), p) and None,
        "dp1.safetensors",
    ),
    "manifest": ("manifest.json", lambda p: flip(p, 40), "manifest.json"),
    "iteration": (
        "manifest.json",
        lambda p: (
            p.write_text(p.read_text().replace('"iteration": 20', '"iteration": 30')) and None
        ),
        "manifest.json does not match its own digest",
    ),
}


def _start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_and_names_the_file(memory: Memory, tmp_path: Path, name: str) -> None:
    drain(memory, tmp_path / "disk", 10)
    folder = drain(memory, tmp_path / "disk", 20)
    file, damage, words = DAMAGE[name]
    damage(folder / file)
    with pytest.raises(SnapshotUnavailableError, match=words), open_newest(open_checkpoint(folder)):
        pass
    with open_newest(open_checkpoint(tmp_path / "disk")) as shards:
        assert shards.info.iteration == 10


def test_every_flipped_byte_of_a_shard_is_found(memory: Memory, tmp_path: Path) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    path = folder / "dp0.safetensors"
    raw = path.read_bytes()
    source = open_checkpoint(folder)
    (info,) = source.snapshots()
    for at in np.random.default_rng(0).integers(0, len(raw), 200):
        flip(path, int(at))
        with pytest.raises(CheckpointDamagedError, match="dp0"), source.open(info):
            pytest.fail(f"byte {at} of {len(raw)} may change unseen")
        path.write_bytes(raw)


def test_a_manifest_of_a_later_release_is_said_to_be_one(memory: Memory, tmp_path: Path) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    path = folder / mf.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2, "new": 1}))
    with pytest.raises(CheckpointDamagedError, match="format version 2"):
        read_manifest(folder)
    drain(memory, tmp_path / "disk", 10)
    manifest = read_manifest(tmp_path / "disk" / folder_name(JOB, 10, SnapshotId(1, 1)))
    path.write_bytes(msgspec.structs.replace(manifest, format_version=2).to_json())
    with pytest.raises(CheckpointDamagedError, match="format version 2"):
        read_manifest(folder)


def test_what_others_may_write_is_not_trusted(memory: Memory, tmp_path: Path) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    (folder / "dp0.safetensors").chmod(0o666)
    with pytest.raises(SnapshotUnavailableError, match="not trusted"):
        with open_newest(open_checkpoint(folder)):
            pass


def test_memory_that_changes_under_the_drain_is_not_written(memory: Memory, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / folder_name(JOB, 20, SnapshotId(1, 2))
    with open_newest(open_live(memory.root, memory.job)) as shards:
        memory.flip("dp0", 2, at=100)
        with pytest.raises(SnapshotUnavailableError, match="dp0 .*changed while it was drained"):
            write_shards(shards, folder)
    assert list(folder.iterdir()) == []


def test_no_manifest_without_all_shards(memory: Memory, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / folder_name(JOB, 20, SnapshotId(1, 2))
    with open_newest(open_live(memory.root, memory.job)) as shards:
        write_shards(shards, folder)
        with pytest.raises(DrainError, match="2 shards of 3"):
            publish(folder, shards.info, JOB, shards.lineage, 3)
        cut(folder / "dp1.safetensors", 1)
        with pytest.raises(DrainError, match="dp1"):
            publish(folder, shards.info, JOB, shards.lineage, 2)
    with pytest.raises(SnapshotUnavailableError, match="not a checkpoint, or one that was never"):
        with open_newest(open_checkpoint(folder)):
            pass


def test_folders_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        open_checkpoint(tmp_path)


def test_verify_tells_by_its_exit_code(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    folders = [drain(memory, disk, 10), drain(memory, disk, 20)]
    here = ["--arena-dir", str(memory.root), "--state-dir", str(tmp_path)]
    assert cli.main(["verify", str(disk)]) == 0
    assert cli.main(["verify", "--job", memory.job, *here]) == 0
    for number, code in ((1, 3), (0, 4)):
        flip(folders[number] / "dp1.safetensors", -1)
        memory.flip("dp1", number + 1)
        assert cli.main(["verify", "--job", memory.job, *here]) == code
        capsys.readouterr()
        assert cli.main(["verify", str(disk)]) == code
        assert "dp1.safetensors" in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path / "absent")]) == 2


# Retention.


@pytest.mark.parametrize("finished", [True, False])
def test_a_drain_that_fails_takes_nothing_from_one_beside_it(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """Two by hand, of one snapshot; the disk has no room for the second."""

    def full(shards: Any, folder: Path, **options: Any) -> int:
        write_shards(shards, folder)
        if finished:
            publish(folder, shards.info, JOB, shards.lineage, len(shards))
        fail(errno.ENOSPC)
        return 0

    monkeypatch.setattr(drain_command, "write_shards", full)
    arguments = ["drain", "--job", memory.job, "--arena-dir", str(memory.root)]
    arguments += ["--to", str(tmp_path / "disk")]
    assert cli.main([*arguments, "--state-dir", str(tmp_path)]) == 2
    if finished:
        assert newest_of(memory, tmp_path / "disk") == 20
    else:
        assert not list((tmp_path / "disk").iterdir())


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_checkpoint_that_cannot_be_read_hides_no_other(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may have lost one of its folders."""
    disk = tmp_path / "disk"
    older, newer = drain(memory, disk, 10), drain(memory, disk, 20)
    checked = private_files.check_folder

    def stale(folder: Path, forbidden: int = private_files.OTHERS) -> None:
        if folder == newer:
            fail(errno.ESTALE)
        checked(folder, forbidden)

    monkeypatch.setattr(private_files, "check_folder", stale)
    assert cli.main(["verify", str(disk)]) == 3
    with open_newest(open_checkpoint(disk)) as shards:
        assert shards.info.iteration == 10
    memory.commit(3, 30)
    newest = drain(memory, disk, 30, keep=1)
    assert sorted(disk.iterdir()) == [newer, newest] and not older.exists()


def test_the_newest_by_snapshot_stay_not_by_iteration() -> None:
    """After a rollback a higher iteration may be the older one."""
    complete = {"a": SnapshotId(1, 9), "b": SnapshotId(2, 1), "c": SnapshotId(1, 3)}
    assert superfluous(complete, 2) == ["c"]
    assert superfluous(complete, 1) == ["c", "a"]
    assert superfluous(complete, 3) == []
    given_up = (Ancestor(1, None), Ancestor(2, SnapshotId(1, 4)))
    assert superfluous(complete, 2, given_up) == ["a"]


def test_a_drain_that_outlived_its_incarnation_removes_nothing_of_a_later_one() -> None:
    complete = {"old": SnapshotId(1, 1), "own": SnapshotId(1, 2)}
    later = {"later": SnapshotId(2, 1)}
    assert superfluous({**complete, **later}, 1, (Ancestor(1, None),)) == ["old"]


def test_older_and_unfinished_ones_go_and_what_is_not_ours_stays(
    memory: Memory, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    unfinished = disk / folder_name(JOB, 5, SnapshotId(1, 0))
    foreign = disk / "iter_0000005-1.0-ffffffff"
    notes = disk / "notes"
    for folder in (unfinished, foreign, notes):
        folder.mkdir(parents=True)
        (folder / ".dp0.safetensors.1234.tmp").write_bytes(b"half")
    kept = [drain(memory, disk, 10), drain(memory, disk, 20)]
    memory.commit(3, 30)
    kept.append(drain(memory, disk, 30))
    assert sorted(disk.iterdir()) == sorted([*kept[1:], foreign, notes])


def test_what_cannot_be_removed_keeps_nothing_else(memory: Memory, tmp_path: Path) -> None:
    """Somebody has put a folder into two of them: all else is gone, and it is said."""
    disk = tmp_path / "disk"
    older = [drain(memory, disk, 10), drain(memory, disk, 20)]
    memory.commit(3, 30)
    newest = drain(memory, disk, 30, keep=3)
    unfinished = [disk / folder_name(JOB, 5, SnapshotId(1, number)) for number in (4, 5)]
    for folder in unfinished:
        folder.mkdir()
        (folder / "dp0.safetensors").touch()
    stuck = [older[0], unfinished[0]]
    for folder in stuck:
        (folder / "another").mkdir()
    for remove in (partial(clean_up, disk, JOB, 1), partial(clear_unfinished, disk, JOB)):
        with pytest.raises(IsADirectoryError, match="another"):
            remove()
    assert sorted(disk.iterdir()) == sorted([*stuck, newest])
    assert [[path.name for path in folder.iterdir()] for folder in stuck] == [["another"]] * 2


# Crashes.


def test_a_kill_at_any_step_leaves_the_last_checkpoint(memory: Memory, tmp_path: Path) -> None:
    """The drain of 20 is killed before each of its steps in turn; 10 was there before."""
    before = tmp_path / "before"
    drain(memory, before, 10)
    counted = Recorder()
    shutil.copytree(before, tmp_path / "count")
    drain(memory, tmp_path / "count", 20, counted, keep=1)
    assert counted.steps > 20
    seen = set()
    for at in range(counted.steps):
        disk = tmp_path / f"disk{at}"
        shutil.copytree(before, disk)
        assert killed(partial(drain, memory, disk, 20, Recorder(at, suicide), keep=1))
        seen.add(newest_of(memory, disk))
        if at % 4 == 0:
            # The next incarnation continues in the same folder.
            drain(memory, disk, 20, keep=1)
            assert newest_of(memory, disk) == 20
            assert len(list(disk.iterdir())) == 1
        shutil.rmtree(disk)
    assert seen == {10, 20}


class PowerOffError(Exception):
    """No system call is made any more."""


class PowerLoss(Recorder):
    """Keeps a second folder as a power loss would leave it: only what was synced is there.

    What was synced in a folder whose own name was not is in a third one until it is.
    """

    def __init__(self, root: Path, shadow: Path, at: int) -> None:
        super().__init__(at, self._off)
        self.root, self.shadow, self.nameless = root, shadow, shadow.with_suffix(".nameless")
        self._content: dict[int, bytes] = {}

    def _off(self) -> None:
        raise PowerOffError

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        size = os.fstat(descriptor).st_size
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self._content[os.fstat(descriptor).st_ino] = Path(path).read_bytes()[:size]

    def remove(self, path: Path) -> None:
        """Removals may become durable before older ones: all but the manifest's do at once."""
        super().remove(path)
        if path.name != mf.MANIFEST:
            (self.shadow / path.relative_to(self.root)).unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Names become durable; a file behind one has what was synced of it, else nothing."""
        super().sync_folder(folder)
        there = self.shadow / folder.relative_to(self.root)
        if not there.exists():
            there = self.nameless / folder.name
            there.mkdir(parents=True, exist_ok=True)
        names = {path.name: path for path in folder.iterdir()}
        for old in list(there.iterdir()):
            if old.name not in names:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for name, path in names.items():
            if (self.nameless / name).exists():
                (self.nameless / name).rename(there / name)
            elif path.is_dir():
                (there / name).mkdir(exist_ok=True)
            else:
                known = (there / name).read_bytes() if (there / name).exists() else b""
                (there / name).write_bytes(self._content.get(path.stat().st_ino, known))


@pytest.mark.parametrize("made", [False, True])
def test_a_power_loss_at_any_step_leaves_a_checkpoint(
    memory: Memory, tmp_path: Path, made: bool
) -> None:
    """``made``: a drain that was killed made the folder, and its name is not durable."""
    before = tmp_path / "before"
    drain(memory, before, 10)
    seen = []
    at = 0
    finished = False
    while not finished:
        root, shadow = tmp_path / f"r{at}", tmp_path / f"s{at}"
        shutil.copytree(before, root)
        shutil.copytree(before, shadow)
        if made:
            (root / folder_name(JOB, 20, SnapshotId(1, 2))).mkdir()
        try:
            drain(memory, root, 20, PowerLoss(root, shadow, at), keep=1)
            finished = True
        except PowerOffError:
            pass
        seen.append(newest_of(memory, shadow))
        at += 1
    assert set(seen) == {10, 20} and seen == sorted(seen), seen


# Errors of the disk.


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_fails_the_drain_and_nothing_else(memory: Memory, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", disk], check=True)
    try:
        drain(memory, disk, 10)
        with pytest.raises(OSError, match="No space left"):
            drain(memory, disk, 20)
        assert newest_of(memory, disk) == 10
        assert not list(disk.glob("*/.*.tmp")), "what was half written holds no space"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_cap_on_bandwidth_spreads_the_bytes() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(100.0, lambda: now[0], sleep)
    pace.after(50)
    now[0] += 2.0
    pace.after(50)
    pace.after(200)
    assert slept == [0.5, 0.5]
    Pace(0, sleep=sleep).after(1 << 40)
    assert len(slept) == 2


def test_the_disk_tier_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import megatron_ft.checkpoint.load"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
