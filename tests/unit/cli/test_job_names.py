"""The name of a job and the folders that it writes to, at its first start and when resumed."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.cli import run_folders
from megatron_ft.cli.run_folders import folders_ready
from megatron_ft.cli.training_command import job_name
from megatron_ft.config import SnapshotConfig
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, check_names
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.virtual import default_root
from megatron_ft.supervisor.event_log import EVENTS, read_events
from megatron_ft.supervisor.job_state import JobState, state_folder
from megatron_ft.supervisor.spec import JobSpec

COMMANDS = [
    ["python", "train.py"],
    ["python", "train.py", "--lr", "1"],
    ["python", "train.py", "--lr 1"],
    ["torchrun", "--nproc-per-node", "8", "/far/away/tr\u00e4in \udcff.py"],
    ["sh", "-c", "true"],
    ["\u6a21"],
    ["x" * 300],
    [],
]


def name_of(command: list[str]) -> str:
    return job_name(argparse.Namespace(training_command=["--", *command]))


def test_each_command_and_folder_has_a_name_that_can_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name_of(command) for command in COMMANDS]
    assert names == [name_of(command) for command in COMMANDS]
    monkeypatch.chdir(tmp_path)
    names += [name_of(command) for command in COMMANDS]
    assert len(set(names)) == 2 * len(COMMANDS) and names[0].startswith("train-")
    for name in names:
        check_names(default_root(), name, ["node-of-a-long-name-0123456789"])
        assert state_folder(name)


class Folder:
    """A folder in which commands run, with arenas, notes and processes of its own."""

    def __init__(self, here: Path, root: Path) -> None:
        self.here, self.root, self.state = here, root, here / "state"

    def run(self, script: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "megatron_ft", "run", "--nodes", "1", "--protect", "none"]
        words += ["--state-dir", str(self.state), "--arena-dir", str(self.root)]
        words += ["--lease-seconds", "2", "--", "sh", "-c", script]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        return subprocess.Popen(
            words, cwd=self.here, env=environment, stdout=subprocess.PIPE, text=True
        )

    def destroy(self) -> None:
        jobs = {path.name for path in self.state.iterdir()}
        procfs.kill_matching(lambda pid: procfs.read_environment(pid).get(JOB) in jobs, str(jobs))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    # Not below tmp_path, whose length may leave no room for the names of sockets.
    with tempfile.TemporaryDirectory() as root:
        made = Folder(tmp_path, Path(root))
        yield made
        made.destroy()


def test_the_same_command_takes_over_and_another_does_not(folder: Folder) -> None:
    """Neither names its job; the supervisor of the first is killed."""
    first = "[ -e a ] && exit 0; touch a; exec sleep 100"
    killed = folder.run(first)
    deadline = time.monotonic() + 60
    while not (folder.here / "a").exists():
        assert time.monotonic() < deadline and killed.poll() is None, "training has not begun"
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(10) == -signal.SIGKILL
    other = folder.run("true")
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 0, said
    (kept,) = [path.parent for path in folder.state.glob("*/job.json")]
    again = folder.run(first)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and f"megatron-ft: job {kept.name}\n" in said, said
    assert {event.incarnation for event in read_events(kept / EVENTS).events} >= {1, 2}, said
    assert len(list(folder.state.glob(f"*/{EVENTS}"))) == 2


def test_commands_about_a_job_mean_the_only_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FT_ARENA_DIR", str(tmp_path / "arenas"))
    (tmp_path / "arenas").mkdir()

    def said(command: str) -> str:
        assert cli.main([*command.split(), "--state-dir", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "there is no job here" in said("ledger")
    for name, moment in (("old", 1), ("ended", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / EVENTS).touch(0o600)
        os.utime(tmp_path / name / EVENTS, (moment, moment))
    assert f"{tmp_path / 'ended' / EVENTS} has no events" in said("ledger")
    with JobState(tmp_path / "one", "one"):
        assert f"{tmp_path / 'one' / EVENTS} has no events" in said("ledger")
        assert "memory of job 'one'" in said("rewind --before-iteration 5")
        with JobState(tmp_path / "two", "two"):
            assert "there are several jobs (one, two) here: give --job" in said("ledger")
            assert f"{tmp_path / 'two' / EVENTS} has no events" in said("ledger --job two")


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    """A job whose drain folder cannot be one: a file is in its place."""
    (tmp_path / "disk").touch()
    settings = SnapshotConfig(drain_dir=tmp_path / "disk", drain_interval=1)
    return JobSpec(name="j", command=("x",), nodes=4, settings=settings, log_dir=tmp_path)


def test_a_first_start_is_refused_for_an_unusable_drain_folder(
    spec: JobSpec, tmp_path: Path
) -> None:
    with JobState(tmp_path / "state", "j") as state:
        with pytest.raises(ConfigError, match="--drain-dir .*disk may not be written to"):
            with folders_ready(spec, state):
                pytest.fail("the job was started")
        assert not (tmp_path / "state").exists()


def test_a_resumed_job_reports_an_unusable_drain_folder_and_starts(
    spec: JobSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JobState(tmp_path / "state", "j") as state:
        state.update(incarnation=3)
        with folders_ready(spec, state):
            shown = capsys.readouterr()
    assert "--drain-dir" in shown.out + shown.err and "resumes without it" in shown.out + shown.err


def test_a_resumed_job_does_not_wait_for_a_disk_that_hangs(
    spec: JobSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_folders, "make_folder", lambda flag, folder: time.sleep(60))
    monkeypatch.setattr(run_folders, "DISK_TIMEOUT_SECONDS", 0.05)
    with JobState(tmp_path / "state", "j") as state:
        state.update(incarnation=3)
        with folders_ready(spec, state):
            shown = capsys.readouterr()
    assert "did not answer within" in shown.out + shown.err
