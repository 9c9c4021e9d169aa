"""Processes that an SMP watches: its writers, stalled readers, trainers that let go of arenas."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core import private_files, procfs
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.rpc import messages as m
from megatron_ft.smp.processes import (
    DRAIN,
    STALL_SECONDS,
    WRITERS_NAME,
    Stalls,
    WriterProcess,
    Writers,
    switches,
)
from megatron_ft.smp.store import SUFFIX
from megatron_ft.smp.survivors import Survivors, holds_arena
from tests.support.frozen_disk import freezable
from tests.support.smp_node import service

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


SLOW = "import time\nprint('runs', flush=True)\nwhile True: time.sleep(0.01)"


def test_a_reader_is_named_once_when_it_has_not_run_for_long() -> None:
    counts = {1: 5, 2: 5}
    stalls = Stalls(100.0, counts.__getitem__)
    both = {"slow": 1, "hung": 2}
    assert stalls.poll(both, 0.0) == []
    counts[1] += 1
    assert stalls.poll(both, 99.0) == []
    assert stalls.poll(both, 100.0) == ["hung"]
    assert stalls.poll(both, 150.0) == []
    counts[2] += 1
    assert stalls.poll(both, 198.0) == []
    assert stalls.poll(both, 199.0) == ["slow"]


def test_a_process_that_sleeps_between_pieces_runs_and_a_stopped_one_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            before = switches(process.pid)
            while switches(process.pid) == before:
                assert process.poll() is None
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert switches(process.pid) == switches(process.pid) > 0
        finally:
            process.kill()
    assert switches(process.pid) == -1


def test_a_stalled_reader_holds_nothing_and_is_told_of(tmp_path: Path) -> None:
    async def story() -> tuple[list[str], list[object]]:
        environment = ProcessEnvironment("job", "n0", tmp_path, 1)
        host = service(environment)
        told: list[object] = []

        async def tell(body: object) -> None:
            told.append(body)

        host.events.publish = tell  # type: ignore[method-assign]
        host.stalls = Stalls(0.0, lambda pid: 7)
        host.readers.watch("r", os.getpid())
        gone: list[str] = []
        host.machine.reader_gone = gone.append  # type: ignore[method-assign]
        await host.drop_stalled()
        await host.drop_stalled()
        assert host.readers.pids == {}
        return gone, told

    gone, told = asyncio.run(story())
    assert gone == ["r"] and told == [m.ReaderStalled("r", STALL_SECONDS)]


HOLD = {
    "nothing": "",
    "a mapping": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); os.closerange(3, 64)",
    "a file": "f = os.open(path, os.O_RDWR)",
    "a mapping of a removed file": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); "
    "os.closerange(3, 64); os.unlink(path)",
    "a mapping that it has ended": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); "
    "os.closerange(3, 64); m.close()",
}


@pytest.mark.parametrize("what", HOLD)
def test_a_process_with_an_arena_is_seen(tmp_path: Path, what: str) -> None:
    path = tmp_path / f"dp0{SUFFIX}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    script = (
        f"import mmap, os, sys; path = sys.argv[1]; {HOLD[what]}\nprint(1, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"1\n"
        held = what not in ("nothing", "a mapping that it has ended")
        assert holds_arena(child.pid, tmp_path) is held
        assert not holds_arena(child.pid, tmp_path / "another")
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        # A dead process that was not reaped yet shows no mappings, and cannot be kept.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert holds_arena(child.pid, tmp_path)
        child.wait()
    assert holds_arena(child.pid, tmp_path)


def test_a_trainer_that_dies_while_it_is_asked_is_not_kept(tmp_path: Path) -> None:
    async def die_when_asked() -> dict[int, int]:
        async def send(_identity: object, _message: object) -> None:
            child.kill()
            await asyncio.wait_for(gone.wait(), 10)

        writers = Writers(tmp_path, lambda _: None)
        survivors = Survivors(writers, tmp_path, send)
        survivors.enter(m.Restartable(child.pid, 3), b"restart-3")
        (writer,) = writers.all()
        gone = writers.gone(writer)
        return await asyncio.wait_for(survivors.let_go(2, [3]), 10)

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        assert asyncio.run(die_when_asked()) == {}
    finally:
        child.kill()
        child.stdin.close()
        child.wait()


def test_a_trainer_that_cannot_train_again_is_replaced_with_its_reason(tmp_path: Path) -> None:
    async def ask() -> tuple[dict[int, int], dict[int, str]]:
        async def send(_identity: object, _message: object) -> None:
            survivors.released(m.Released(3, 2, "nice was changed"))

        survivors = Survivors(Writers(tmp_path, lambda _: None), tmp_path, send)
        survivors.enter(m.Restartable(child.pid, 3), b"restart-3")
        return await asyncio.wait_for(survivors.let_go(2, [3]), 10), survivors.renewed

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        kept, renewed = asyncio.run(ask())
        assert kept == {} and "nice was changed" in renewed[3]
    finally:
        child.kill()
        child.stdin.close()
        child.wait()
