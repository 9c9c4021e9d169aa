"""`megatron-ft doctor` on real causes: small tmpfs, low limits, read-only folders, leftovers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_ft.checkpoint.export_drained import Holder, hold
from megatron_ft.cli import main as cli
from megatron_ft.cli.doctor import as_trainer
from megatron_ft.cli.doctor.examine import drain_token, export_folders
from megatron_ft.cli.doctor.facts import (
    MARK,
    ExportFolder,
    ExportPlace,
    NodeFacts,
    ProbeRequest,
    TrainerFacts,
    Wishes,
    answers,
    last_words,
)
from megatron_ft.cli.doctor.probe import (
    code_digest,
    filesystem_of,
    measure_drain,
    remove_ipc,
    try_folder,
)
from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.supervisor.job_state import JobState, state_folder
from tests.support.doctor_facts import wishes

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


def probe(
    root: Path,
    drain: Path | None = None,
    rate: int = MIB,
    exports: Path | None = None,
    **options: Any,
) -> NodeFacts:
    """The real probe as a process of its own, as a launcher starts it."""
    node_dir = root / "job" / "n0"
    folders = () if exports is None else (str(exports),)
    request = ProbeRequest(".token", str(root), "rs:2+1", str(drain or ""), rate, folders)
    marks = {JOB: "job", NODE: "n0", NODE_DIR: str(node_dir), INCARNATION: "0"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.cli.doctor.probe"], env={**os.environ, **marks},
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
    assert found.code == code_digest() and "numpy" in found.packages


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


def wishes_with(folder: Path, job: uuid.UUID | None = None) -> Wishes:
    return wishes(exports={"--drain-export-dir": str(folder)}, job=job)


def test_a_probe_sees_the_lock_that_is_taken_here_in_the_same_folder(
    small_tmpfs: Path, tmp_path: Path
) -> None:
    """Where it is not, locks are each machine's own; here the other folder stands for that."""
    with export_folders(wishes_with(tmp_path / "here"), ".token") as (here,):
        assert here == ExportFolder("--drain-export-dir", str(tmp_path / "here"))
        found = probe(small_tmpfs, exports=tmp_path / "here").exports
        assert found == {str(tmp_path / "here"): ExportPlace(same=True, locked=True)}
        (tmp_path / "there").mkdir()
        assert try_folder(tmp_path / "there", ".token", "n0") == ExportPlace()
        (tmp_path / "there" / ".token.lock").write_text(".another")
        assert try_folder(tmp_path / "there", ".token", "n0") == ExportPlace()
        (tmp_path / "there" / ".token.lock").write_text(".token")
        assert try_folder(tmp_path / "there", ".token", "n0") == ExportPlace(same=True)
        missing = try_folder(tmp_path / "missing", ".token", "n0")
        assert missing.error == "No such file or directory"
        (tmp_path / "here" / ".token.n1.export").touch()
    assert not list((tmp_path / "here").iterdir()), "nothing is left"


def test_where_nothing_can_be_locked_the_doctor_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with export_folders(wishes_with(tmp_path), ".token") as (here,):
        assert (here.holder, here.problem) == ("", "No locks available")
        seen = try_folder(tmp_path, ".token", "n0")
        assert seen == ExportPlace(same=True, problem="No locks available")


def test_the_doctor_names_the_job_that_exports_to_a_folder(tmp_path: Path) -> None:
    holder = Holder("other", uuid.UUID(int=1), "there", 22)

    def found(job: uuid.UUID | None = None) -> str:
        with export_folders(wishes_with(tmp_path, job), ".token") as (here,):
            return here.holder

    with hold(tmp_path, holder):
        assert found() == found(uuid.UUID(int=2)) == "job 'other' (process 22 on there)"
        assert found(holder.job) == "", "that job continues"
    assert found() == "", "it has ended"
    with hold(tmp_path, Holder("later", uuid.UUID(int=3), "here", 33)) as problem:
        assert problem == "", "the doctor keeps nobody out"


def test_a_job_may_go_on_where_it_exports_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = tmp_path / "exports"
    exports.mkdir()
    flags = ["--json", "--nodes", "1", "--protect", "none", "--rate-mib", "1"]
    flags += ["--state-dir", str(tmp_path / "state"), "--drain-dir", str(tmp_path / "drains")]
    flags += ["--drain-interval", "5", "--drain-export-dir", str(exports)]
    found = {}
    with (
        tempfile.TemporaryDirectory() as root,
        JobState(state_folder("first", tmp_path / "state"), "first") as state,
        hold(exports, Holder("first", state.record.job, "here", 11)),
    ):
        for job in ("first", "second"):
            cli.main(["doctor", *flags, "--arena-dir", root, "--job", job, "--", sys.executable])
            findings = json.loads(capsys.readouterr().out)["findings"]
            found[job] = next(f["verdict"] for f in findings if f["check"] == "export folder")
    assert found == {"first": "ok", "second": "refused"}


def test_nothing_is_left_of_a_probe_that_was_killed(tmp_path: Path) -> None:
    with drain_token(tmp_path, ".token"):
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
    assert remove_ipc([str(tmp_path / "a"), str(tmp_path / "b")]) is expected


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "d / ext4 rw 0 0\nt /dev/shm tmpfs rw 0 0\nx /dev/shm/a\\040b xfs rw 0 0\n"
    kinds = [filesystem_of(Path(p), mounts) for p in ("/x", "/dev/shm/j", "/dev/shm/a b/c")]
    assert kinds == ["ext4", "tmpfs", "xfs"]
    assert filesystem_of(Path("/dev/shm2"), mounts) == "ext4"


@pytest.mark.mpi
def test_doctor_takes_runs_flags_and_names_each_cause(small_tmpfs: Path, tmp_path: Path) -> None:
    """One whole examination in which several things are wrong at once."""
    (tmp_path / "racks").write_text("r1: node[0-1]\nr2: node2")
    drain = tmp_path / "file" / "drain"
    (tmp_path / "file").touch()
    (tmp_path / "held").mkdir()
    command = [
        sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json", "--rate-mib", "1",
        "--nodes", "2", "--spares", "1", "--arena-dir", str(small_tmpfs), "--shard-gib", "0.1",
        "--failure-domains", str(tmp_path / "racks"), "--state-dir", str(tmp_path / "state"),
        "--", sys.executable, "train.py", "--inmem-snapshot", "--inmem-protect", "xor:2",
        "--inmem-drain-dir", str(drain), "--inmem-drain-interval", "5",
        "--inmem-drain-export-dir", str(tmp_path / "held"),
    ]  # fmt: skip
    with hold(tmp_path / "held", Holder("other", uuid.UUID(int=1), "there", 22)):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, preexec_fn=lower_limits, timeout=200, check=False
        )
    report = json.loads(done.stdout)
    found = {f["check"]: f for f in report["findings"]}
    assert done.returncode == 1 and report["verdict"] == "refused"
    refused = {check for check, f in found.items() if f["verdict"] == "refused"}
    assert refused - {"versions"} == {
        "memory", "descriptors", "drain folder", "export folder"
    }, report  # fmt: skip
    assert "job 'other' (process 22 on there) exports" in found["export folder"]["text"]
    assert "free space of" in found["memory"]["text"]
    assert "Not a directory" in found["drain folder"]["text"]
    # The first two nodes are of one rack: the third trains, the second is the spare.
    assert found["spares"]["text"] == "in reserve: node1"
    assert "r1: node0; r2: node2" in found["protection"]["text"]
    assert found["same arena"]["verdict"] == "ok"
    assert "SMP, trainer and encoder" in found["same arena"]["text"]
    assert found["mpi"]["verdict"] == "ok" and "MPI" in found["mpi"]["text"]
    assert "all 3 pairs" in found["pairs"]["text"], report
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
