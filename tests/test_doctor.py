"""`megatron-ft doctor` on real causes: small tmpfs, low limits, read-only folders, leftovers."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_ft.cli import main as cli
from megatron_ft.doctor import as_trainer, machine
from megatron_ft.doctor.answer import MARK, answers, last_words
from megatron_ft.doctor.examine import DrainToken
from megatron_ft.doctor.facts import NodeFacts, ProbeRequest, TrainerFacts
from megatron_ft.doctor.rates import measure_drain
from megatron_ft.environment import INCARNATION, JOB, NODE, NODE_DIR

MIB = 1 << 20
TIMEOUT = 60


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A tmpfs of 24 MiB; only root can have one.  Its path is short, as sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="mft-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=TIMEOUT)
    folder.rmdir()


def lower_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def probe(root: Path, drain: Path | None = None, rate: int = MIB, **options: Any) -> NodeFacts:
    """The real probe as a process of its own, as a launcher starts it."""
    node_dir = root / "job" / "n0"
    node_dir.mkdir(parents=True, exist_ok=True)
    request = ProbeRequest(".token", str(root), "rs:2+1", str(drain or ""), rate)
    marks = {JOB: "job", NODE: "n0", NODE_DIR: str(node_dir), INCARNATION: "0"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.doctor.probe"], env={**os.environ, **marks},
        input=msgspec.json.encode(request), stdout=subprocess.PIPE, timeout=TIMEOUT, check=True,
        **options,
    )  # fmt: skip
    line = done.stdout.decode().removeprefix(MARK)
    return msgspec.json.decode(line, type=NodeFacts)


def test_a_probe_finds_small_memory_low_limits_and_leftovers(small_tmpfs: Path) -> None:
    dead = small_tmpfs / "old-job" / "n0"
    dead.mkdir(parents=True)
    (dead / "a.arena").write_bytes(bytes(MIB))
    asked = time.time()
    found = probe(small_tmpfs, preexec_fn=lower_limits)
    assert asked <= found.began <= found.ended <= time.time()
    assert (found.descriptors, found.descriptors_hard, found.locked_memory) == (200, 200, 65536)
    assert found.arena.filesystem == "tmpfs" and found.arena.total_bytes == 24 * MIB
    free = {limit.limit: limit.available_bytes for limit in found.arena.limits}
    assert free[f"free space of {small_tmpfs}"] <= 23 * MIB
    assert [(j.job, j.process) for j in found.arena.leftovers] == [("old-job", "")]
    assert found.arena.leftovers[0].allocated_bytes >= MIB
    status = (small_tmpfs / "job" / "n0" / ".token").stat()
    assert (found.arena.device, found.arena.inode) == (status.st_dev, status.st_ino)
    assert min(found.rates.memory, found.rates.arena, found.rates.encode) > 0
    assert os.listdir(small_tmpfs / "job" / "n0") == [".token"]
    assert found.code == machine.code_digest() and "numpy" in found.packages


def test_a_probe_survives_what_it_cannot_do(small_tmpfs: Path) -> None:
    """The arena is too small to be measured; the drain folder is read-only."""
    drain = small_tmpfs / "drain"
    drain.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(drain)], check=True)
    try:
        found = probe(small_tmpfs, drain, rate=32 * MIB)
    finally:
        subprocess.run(["umount", str(drain)], check=True, timeout=TIMEOUT)
    assert found.rates.memory > 0 and "No space left" in found.rates.error
    assert found.drain is not None and "Read-only file system" in found.drain.error
    # What could not be written is not left behind.
    assert os.listdir(small_tmpfs / "job" / "n0") == [".token"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have its files be another user's")
def test_a_drain_folder_that_gives_files_to_others_is_none(tmp_path: Path) -> None:
    """As NFS with root_squash does; a job refuses checkpoints that are not its user's."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory(prefix="mft-") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        libc.setfsuid(65534)
        try:
            squashed = measure_drain(folder, ".token", "n0", MIB)
        finally:
            libc.setfsuid(0)
        assert "belongs to user 65534, not to 0: it is not trusted" in squashed.error
        assert not measure_drain(folder, ".token", "n0", MIB).error
        assert os.listdir(folder) == [".token.n0"]


def test_nothing_is_left_of_a_probe_that_was_killed(tmp_path: Path) -> None:
    with DrainToken(tmp_path, ".token"):
        (tmp_path / ".token.n0.checkpoint").mkdir()
        for name in (".token.n0.checkpoint/shard", ".token.n1.rate", "other"):
            (tmp_path / name).touch()
    assert os.listdir(tmp_path) == ["other"]


def test_a_trainer_is_asked_by_source_alone(tmp_path: Path) -> None:
    """Without this package, in an isolated Python, from a log with other lines in it."""
    (tmp_path / ".token").touch()
    log = tmp_path / "log"
    source = Path(as_trainer.__file__).read_text()
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, "-I", "-c", source, ".token"],
            env={NODE_DIR: str(tmp_path)}, stdout=file, timeout=TIMEOUT, check=True,
        )  # fmt: skip
    with log.open("a") as file:
        file.write(f"something else\n{MARK}{{half\n")
    (found,) = answers(log, TrainerFacts)
    assert found.inode == (tmp_path / ".token").stat().st_ino and not found.error
    assert found.executable == sys.executable
    assert last_words(log) == "something else"


@pytest.mark.parametrize(
    ("files", "expected"),
    [({}, None), ({"a/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
     ({"a/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
     ({"a/logind.conf": "RemoveIPC=no", "b/logind.conf": "RemoveIPC=yes"}, False),
     ({"a/logind.conf": "RemoveIPC=no", "b/logind.conf.d/9.conf": "RemoveIPC = yes"}, True),
     ({"b/logind.conf.d/9.conf": "RemoveIPC=1", "a/logind.conf.d/9.conf": "RemoveIPC=0"}, False)],
)  # fmt: skip
def test_logind_is_read_as_it_reads_itself(
    tmp_path: Path, files: dict[str, str], expected: bool | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.remove_ipc([str(tmp_path / "a"), str(tmp_path / "b")]) is expected


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "d / ext4 rw 0 0\nt /dev/shm tmpfs rw 0 0\nx /dev/shm/a\\040b xfs rw 0 0\n"
    kinds = [machine.filesystem_of(Path(p), mounts) for p in ("/x", "/dev/shm/j", "/dev/shm/a b/c")]
    assert kinds == ["ext4", "tmpfs", "xfs"]
    assert machine.filesystem_of(Path("/dev/shm2"), mounts) == "ext4"


@pytest.mark.mpi
def test_doctor_takes_runs_flags_and_names_each_cause(small_tmpfs: Path, tmp_path: Path) -> None:
    """One whole examination in which several things are wrong at once."""
    (tmp_path / "racks").write_text("r1: node[0-1]\nr2: node2")
    drain = tmp_path / "file" / "drain"
    (tmp_path / "file").touch()
    command = [
        sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json", "--rate-mib", "1",
        "--nodes", "2", "--spares", "1", "--arena-dir", str(small_tmpfs), "--shard-gib", "0.1",
        "--failure-domains", str(tmp_path / "racks"), "--state-dir", str(tmp_path / "state"),
        "--", sys.executable, "train.py", "--inmem-snapshot", "--inmem-protect", "xor:2",
        "--inmem-drain-dir", str(drain), "--inmem-drain-interval", "5",
        "--inmem-drain-export-dir", str(tmp_path / "made" / "exports"),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, preexec_fn=lower_limits, timeout=200, check=False
    )
    report = json.loads(done.stdout)
    found = {f["check"]: f for f in report["findings"]}
    assert done.returncode == 1 and report["verdict"] == "refused"
    refused = {check for check, f in found.items() if f["verdict"] == "refused"}
    assert refused - {"versions"} == {"memory", "descriptors", "drain folder"}, report
    assert "free space of" in found["memory"]["text"]
    assert "Not a directory" in found["drain folder"]["text"]
    # The first two nodes are of one rack: the third trains, the second is the spare.
    assert found["spares"]["text"] == "in reserve: node1"
    assert "r1: node0; r2: node2" in found["protection"]["text"]
    assert found["same arena"]["verdict"] == "ok"
    assert "SMP, trainer and encoder" in found["same arena"]["text"]
    assert found["mpi"]["verdict"] == "ok" and "MPI" in found["mpi"]["text"]
    assert "all 3 pairs" in found["pairs"]["text"] or found["pairs"]["verdict"] == "warning"
    assert os.listdir(small_tmpfs) == [] == os.listdir(tmp_path / "state")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--nodes 0", "--nodes is 0; give a number >= 1"),
     ("--nodes 1 --spares -1", "--spares is -1; give a number >= 0"),
     ("--nodes 1 --ranks-per-node 0", "--ranks-per-node is 0; give a number >= 1"),
     ("--nodes 1 --restore-from /absent", "/absent holds no whole checkpoint"),
     ("--nodes 1 --drain-dir {0}/d --drain-interval 5 --drain-export-dir /proc/x",
      "--drain-export-dir /proc/x cannot be made")],
)  # fmt: skip
def test_what_run_refuses_the_doctor_refuses_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    for command in ("doctor", "run"):
        # Not below tmp_path, whose length may leave no room for the names of sockets.
        with tempfile.TemporaryDirectory() as root:
            places = ["--arena-dir", root, "--state-dir", str(tmp_path / "state")]
            words = [command, "--protect", "none", *flags.format(tmp_path).split(), *places]
            assert cli.main([*words, "--", "true"]) == 2
        assert said in capsys.readouterr().err
        if command == "doctor":
            assert not (tmp_path / "d").exists()
