"""The registry of a node's writers where its list cannot be written, as on a full file system."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core import private_files
from megatron_ft.core.errors import UntrustedFileError
from megatron_ft.smp.processes import WRITERS_NAME, WriterProcess, Writers

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
