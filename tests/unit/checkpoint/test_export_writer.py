"""What writes an export holds the folder, too: it may outlive the supervisor that held it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from megatron_ft.checkpoint.disk_format import folder_name
from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.checkpoint.export_drained import LOCK, Holder, hold
from megatron_ft.core.errors import ConfigError
from tests.support.disk_drains import drain
from tests.support.disk_samples import JOB, Memory
from tests.support.jobs import ROOT

TIMEOUT = 60.0
ITERATION = 10
FIRST = Holder("first", JOB, "here", 11)
SECOND = Holder("second", uuid.UUID(int=8), "there", 22)


@pytest.fixture
def plan(tmp_path: Path) -> DrainPlan:
    """Of a drained checkpoint, and of an empty folder for its export."""
    memory, drains = Memory(tmp_path / "memory"), tmp_path / "drains"
    snapshot = memory.commit(1, ITERATION)
    assert drain(memory, drains, ITERATION) == drains / folder_name(JOB, ITERATION, snapshot)
    exports = tmp_path / "exports"
    exports.mkdir()
    return DrainPlan(JOB, snapshot, ITERATION, "local", (), drains, 2, export_dir=exports)


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program; whoever has its ends of the pipes lives no longer than the block."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/programs/slow_exporter.py"), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate(timeout=TIMEOUT)


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
    assert ready, f"{process.args} said nothing within {TIMEOUT} s"
    return process.stdout.readline().strip()


def exports_of(plan: DrainPlan) -> Path:
    assert plan.export_dir is not None
    return plan.export_dir


def test_no_other_job_begins_while_an_exporter_outlives_its_supervisor(plan: DrainPlan) -> None:
    folder, holder = exports_of(plan), msgspec.json.encode(FIRST).decode()
    with started("supervise", str(folder), holder, plan.to_json()) as supervisor:
        assert next_line(supervisor) == "writes"
        supervisor.kill()
        assert supervisor.wait(TIMEOUT) == -signal.SIGKILL
        with pytest.raises(ConfigError, match="job 'first' .process 11 on here. exports there"):
            hold(folder, SECOND).__enter__()
        with hold(folder, FIRST) as problem:
            assert problem == "", "its own next supervisor continues"
            with pytest.raises(ConfigError, match="job 'first'"):
                hold(folder, SECOND).__enter__()
        supervisor.communicate("\n", timeout=TIMEOUT)
    assert (folder / "iter_0000010").is_dir()
    with hold(folder, SECOND) as problem:
        assert problem == ""


def test_an_exporter_that_comes_late_leaves_the_folder_to_another_job(plan: DrainPlan) -> None:
    folder = exports_of(plan)
    with hold(folder, FIRST):
        pass
    with hold(folder, SECOND), started("export", plan.to_json()) as exporter:
        said = next_line(exporter)
        assert "job 'second' (process 22 on there) exports there" in said, said
        assert exporter.wait(TIMEOUT) == 1
        assert [one.name for one in folder.iterdir()] == [LOCK]


@pytest.mark.parametrize("left", [(), (SECOND,)])
def test_where_no_supervisor_holds_the_folder_an_exporter_writes(
    plan: DrainPlan, left: tuple[Holder, ...]
) -> None:
    """It could not lock; the name of a job that has ended may be in the file."""
    folder = exports_of(plan)
    for holder in left:
        with hold(folder, holder):
            pass
    with started("export", plan.to_json()) as exporter:
        assert next_line(exporter) == "writes"
        exporter.communicate("\n", timeout=TIMEOUT)
        assert exporter.returncode == 0


def test_who_signs_and_is_overtaken_before_it_shares_does_not_hold_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives one lock back before it gives the other."""
    real, overtaking = fcntl.flock, ExitStack()

    def overtaken(lock: int, kind: int) -> None:
        if kind & fcntl.LOCK_SH:
            monkeypatch.undo()
            real(lock, fcntl.LOCK_UN)
            file = overtaking.enter_context(open(tmp_path / LOCK, "r+b"))
            real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        real(lock, kind)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with overtaking, pytest.raises(ConfigError, match="job 'first' cannot export"):
        hold(tmp_path, FIRST).__enter__()
