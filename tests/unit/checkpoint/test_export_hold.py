"""Of two running jobs that are told to export to one folder, the second is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.checkpoint.export_drained import LOCK, Holder, hold
from megatron_ft.cli import main as cli
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.virtual import VirtualCluster
from tests.support.jobs import ROOT

FIRST = Holder("first", uuid.UUID(int=1), "here", 11)
SECOND = Holder("second", uuid.UUID(int=2), "there", 22)


def words(job: str, root: Path, folder: Path, *exports: str) -> list[str]:
    where = ["--arena-dir", str(root), "--state-dir", str(folder / "state")]
    drains = ["--drain-dir", str(folder / "drains"), "--drain-interval", "5"]
    return ["run", "--job", job, "--nodes", "1", "--protect", "none", *where, *drains, *exports]


@pytest.fixture
def root() -> Iterator[Path]:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        for job in Path(folder).iterdir():
            VirtualCluster(job.name, ["node0"], Path(folder)).destroy()


def test_a_job_does_not_export_where_another_one_does(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exports = tmp_path / "exports"
    first = words("first", root, tmp_path, "--drain-export-dir", str(exports), "--", "sleep", "600")
    second = words("second", root, tmp_path, "--drain-export-dir", str(exports), "--", "true")
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ft.cli.main", *first],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as supervisor:
        assert supervisor.stdout is not None
        assert any("trainers started" in line for line in supervisor.stdout)
        try:
            assert cli.main(second) == 2
            said = capfd.readouterr().err
            assert f"job 'second' cannot export to {exports}: job 'first' (process" in said
            assert f"process {supervisor.pid} on " in said and "another folder" in said
            assert [one.name for one in root.iterdir()] == ["first"], "what was refused is left"
            assert [one.name for one in (tmp_path / "state").iterdir()] == ["first"]
        finally:
            supervisor.kill()
    assert cli.main(second) == 0, "the first one has ended, without a chance to say so"


def test_a_job_needs_no_locks(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = tmp_path / "exports"
    flags = ["--drain-export-dir", str(exports)]
    real = fcntl.flock

    def refuse(lock: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{lock}").endswith(LOCK):
            raise OSError(errno.ENOLCK, "No locks available")
        real(lock, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cli.main(words("job", root, tmp_path, *flags, "--", "true")) == 0
    warned = f"--drain-export-dir {exports} cannot be locked (No locks available): see to it"
    assert warned in capfd.readouterr().out


def test_a_lock_that_a_lost_machine_has_left_keeps_nobody_from_its_own_job(tmp_path: Path) -> None:
    again = Holder("first", FIRST.job, "elsewhere", 33)
    with hold(tmp_path, SECOND), pytest.raises(ConfigError, match=f"remove {tmp_path / LOCK}"):
        hold(tmp_path, FIRST).__enter__()
    with hold(tmp_path, FIRST), hold(tmp_path, again) as problem:
        assert problem == ""
        with pytest.raises(ConfigError, match=r"job 'first' \(process 11 on here\) exports there"):
            hold(tmp_path, SECOND).__enter__()


def test_who_has_not_said_its_name_is_another_job(tmp_path: Path) -> None:
    with open(tmp_path / LOCK, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another job exports there"):
            hold(tmp_path, FIRST).__enter__()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / LOCK).symlink_to(other)
    with hold(tmp_path, FIRST) as problem:
        assert problem
    assert other.read_text() == "not ours"
