"""`megatron-ft doctor` on real causes: small tmpfs, low limits, read-only folders."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_ft.checkpoint.export_drained import Holder, hold
from megatron_ft.cli import main as cli
from megatron_ft.cli.doctor import as_trainer
from megatron_ft.cli.doctor.examine import token_in
from megatron_ft.cli.doctor.facts import (
    MARK,
    NodeFacts,
    ProbeRequest,
    TrainerFacts,
    answers,
    last_words,
)
from megatron_ft.cli.doctor.probe import code_digest, filesystem_of, removes_ipc, shared_folder
from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.supervisor.job_state import JobState, state_folder

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


def probe(root: Path, *folders: Path) -> NodeFacts:
    """The real probe as a process of its own, as a launcher starts it."""
    request = ProbeRequest(".token", str(root), tuple(map(str, folders)))
    marks = {JOB: "job", NODE: "n0", NODE_DIR: str(root / "job" / "n0"), INCARNATION: "0"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.cli.doctor.probe"], env={**os.environ, **marks},
        input=msgspec.json.encode(request), stdout=subprocess.PIPE, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    line = done.stdout.decode().removeprefix(MARK)
    return msgspec.json.decode(line, type=NodeFacts)


def test_a_probe_finds_small_memory_and_folders(small_tmpfs: Path, tmp_path: Path) -> None:
    """A read-only folder, one that is the doctor's, and one that is another."""
    closed, here, there = small_tmpfs / "closed", tmp_path / "here", tmp_path / "there"
    closed.mkdir()
    there.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(closed)], check=True)
    try:
        with token_in([str(here)], ".token"):
            found = probe(small_tmpfs, closed, here, there)
            assert (here / ".token.n0").exists() and (there / ".token.n0").exists()
    finally:
        subprocess.run(["umount", str(closed)], check=True, timeout=TIMEOUT)
    assert found.folders[str(closed)].error == "Read-only file system"
    assert [found.folders[str(f)].same for f in (closed, here, there)] == [False, True, False]
    assert found.folders[str(here)].free_bytes > 0 and not found.folders[str(here)].distrust
    assert found.arena.filesystem == "tmpfs" and found.arena.total_bytes == 24 * MIB
    free = {limit.limit: limit.available_bytes for limit in found.arena.limits}
    assert free[f"free space of {small_tmpfs}"] <= 24 * MIB
    status = (small_tmpfs / "job" / "n0" / ".token").stat()
    assert (found.arena.device, found.arena.inode) == (status.st_dev, status.st_ino)
    assert os.listdir(small_tmpfs / "job" / "n0") == [".token"] and not os.listdir(here)
    assert found.code == code_digest()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have its files be another user's")
def test_a_drain_folder_that_gives_files_to_others_is_none(tmp_path: Path) -> None:
    """As NFS with root_squash does; a job refuses checkpoints that are not its user's."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory(prefix="mft-") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        libc.setfsuid(65534)
        try:
            squashed = shared_folder(folder, ".token", "n0")
        finally:
            libc.setfsuid(0)
        assert squashed.distrust.startswith("belongs to user 65534, not to 0")
        assert not shared_folder(folder, ".token", "n0").distrust
        assert os.listdir(folder) == [".token.n0"]


def test_a_job_may_go_on_where_it_exports_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = tmp_path / "exports"
    exports.mkdir()
    flags = ["--json", "--nodes", "1", "--protect", "none"]
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
    with token_in([str(tmp_path)], ".token"):
        (tmp_path / ".token.n0.checkpoint").mkdir()
        for name in (".token.n0.checkpoint/shard", ".token.n1", "other"):
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
    ("config", "expected"),
    [("# /etc/systemd/logind.conf\n[Login]\n#RemoveIPC=no\n", True), ("", False),
     ("[Login]\nRemoveIPC=no\n", False), ("RemoveIPC=no\n# /run/x.conf\nRemoveIPC = yes", True)],
)  # fmt: skip
def test_the_last_line_of_logind_s_files_counts(
    tmp_path: Path, config: str, expected: bool
) -> None:
    shown = ["printf", "%s", config]
    user = pwd.getpwnam("nobody")
    assert removes_ipc(user.pw_uid, shown, tmp_path) is expected
    assert not removes_ipc(0, shown, tmp_path), "logind spares system users"
    assert not removes_ipc(user.pw_uid, ["/no/such/program"], tmp_path)
    (tmp_path / "nobody").touch()
    assert not removes_ipc(user.pw_uid, shown, tmp_path), "the user lingers"


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
        sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json",
        "--nodes", "2", "--spares", "1", "--arena-dir", str(small_tmpfs), "--shard-gib", "0.1",
        "--failure-domains", str(tmp_path / "racks"), "--state-dir", str(tmp_path / "state"),
        "--health-command", "test $MEGATRON_FT_NODE != node0 || sleep 99", "--health-seconds", "2",
        "--", sys.executable, "train.py", "--inmem-snapshot", "--inmem-protect", "xor:2",
        "--inmem-drain-dir", str(drain), "--inmem-drain-interval", "5",
        "--inmem-drain-export-dir", str(tmp_path / "held"),
    ]  # fmt: skip
    with hold(tmp_path / "held", Holder("other", uuid.UUID(int=1), "there", 22)):
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=200, check=False)
    report = json.loads(done.stdout)
    found = {f["check"]: f for f in report["findings"]}
    assert done.returncode == 1 and report["verdict"] == "refused"
    refused = {check for check, f in found.items() if f["verdict"] == "refused"}
    assert refused - {"versions"} == {
        "memory", "drain folder", "export folder"
    }, report  # fmt: skip
    assert "job 'other' (process 22 on there) exports" in found["export folder"]["text"]
    assert "free space of" in found["memory"]["text"]
    assert "Not a directory" in found["drain folder"]["text"]
    # The first two nodes are of one rack: the third trains, the second is the spare.
    assert found["spares"]["text"] == "in reserve: node1"
    assert "r1: node0; r2: node2" in found["protection"]["text"]
    assert found["same arena"]["verdict"] == "ok"
    assert "SMP, trainer and encoder" in found["same arena"]["text"]
    assert found["encoders"]["verdict"] == "ok" and "MPI" in found["encoders"]["text"], report
    health = next(f for f in report["findings"] if f["check"] == "health")
    assert (health["nodes"], health["verdict"]) == (["node0"], "warning")
    assert "it has not ended within 2 s" in health["text"]
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
