"""Folders that a job writes to, at its first start and when it is resumed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_ft.cli import run_folders
from megatron_ft.cli.run_folders import folders_ready
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.spec import JobSpec


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
