"""The registry of a node's writers: lists that cannot be written, drains that cannot be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core import private_files, procfs
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.smp.processes import DRAIN, WRITERS_NAME, WriterProcess, Writers
from tests.support.frozen_disk import freezable

WAIT = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as found:
        yield found
        found.kill()


def keep_from_writing(folder: Path) -> None:
    """Whatever is to be in the list is first written beside it, where this lies now."""
    spare = private_files.spare_of(folder / WRITERS_NAME)
    spare.unlink(missing_ok=True)
    spare.mkdir()


def test_a_death_is_told_though_the_list_cannot_be_written(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    died: list[WriterProcess] = []

    async def watch() -> list[WriterProcess]:
        writers = Writers(tmp_path, died.append)
        writers.add("trainer", "pp0-tp0-dp0-ep0", process.pid, b"one")
        keep_from_writing(tmp_path)
        await writers.kill(writers.all(), WAIT)
        return writers.all()

    assert asyncio.run(watch()) == []
    assert [writer.pid for writer in died] == [process.pid]
    private_files.spare_of(tmp_path / WRITERS_NAME).rmdir()
    process.wait(WAIT)

    async def adopt() -> list[WriterProcess]:
        return Writers(tmp_path, died.append).adopt()

    assert asyncio.run(adopt()) == died


def test_who_cannot_be_written_down_is_not_watched(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    keep_from_writing(tmp_path)

    async def add() -> list[WriterProcess]:
        writers = Writers(tmp_path, lambda writer: pytest.fail(f"{writer} was watched"))
        with pytest.raises(UntrustedFileError, match="plain file"):
            writers.add("encoder", "world-1", process.pid, b"one")
        process.kill()
        await asyncio.to_thread(process.wait, WAIT)
        return writers.all()

    assert asyncio.run(add()) == []


def test_who_has_died_unnoticed_is_killed_like_any_other(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """It is dead and reaped, and the event loop has not had its turn since."""
    died: list[WriterProcess] = []

    async def watch() -> list[WriterProcess]:
        writers = Writers(tmp_path, died.append)
        writers.add("encoder", "world-1", process.pid, b"one")
        process.kill()
        process.wait(WAIT)
        await writers.kill(writers.all(), WAIT)
        return writers.all()

    assert asyncio.run(watch()) == []
    assert [writer.pid for writer in died] == [process.pid]


WRITE = "import sys; print('now', flush=True); open(sys.argv[1], 'w').write('x')"


def test_a_drain_that_the_kernel_holds_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A trainer or encoder in its place could still write to an arena, so it does."""
    died: list[WriterProcess] = []

    async def fence(stuck: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
        writers = Writers(tmp_path, died.append)
        drain = writers.add(DRAIN, f"write-{stuck.pid}", stuck.pid, b"")
        trainer = writers.add("trainer", "dp0", other.pid, b"")
        assert writers.hanging() == [], "nobody has killed it"
        await asyncio.wait_for(writers.kill(writers.all(), WAIT), WAIT / 2)
        assert died == [trainer] and writers.hanging() == [drain] and writers.running() == []
        again = Writers(tmp_path, died.append)
        assert again.adopt() == [] and again.hanging() == [drain], "a new SMP knows it, too"
        writer = again.add("encoder", "w1", stuck.pid, b"")
        with pytest.raises(ControlPlaneError, match=r"encoder w1 \(pid"):
            await again.kill(again.all(), 1.5)
        gone = again.gone(writer)
        disk.thaw()
        await asyncio.wait_for(gone.wait(), WAIT)
        assert again.all() == []

    with freezable(tmp_path) as disk:
        disk.freeze()
        command = [sys.executable, "-c", WRITE, str(disk.folder / "file")]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as stuck,
            subprocess.Popen(["sleep", "100"]) as other,
        ):
            assert stuck.stdout is not None and stuck.stdout.readline() == b"now\n"
            _wait_until_stuck(stuck.pid)
            try:
                asyncio.run(fence(stuck, other))
            finally:
                disk.thaw()
                stuck.kill()
                other.kill()


def _wait_until_stuck(pid: int) -> None:
    """Until a process is in the state D (proc(5))."""
    deadline = time.monotonic() + WAIT
    while not procfs.read_status(pid)["State"].startswith("D"):
        assert time.monotonic() < deadline, "the process does not wait for the disk"
        time.sleep(0.01)
