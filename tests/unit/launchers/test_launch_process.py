"""Handles of real processes: start, attach, wait, kill, and what outlives the starter."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.launchers.launcher import UNKNOWN_EXIT
from megatron_ft.launchers.process import LocalProcess, open_session
from megatron_ft.launchers.slurm.allocation import Allocation
from megatron_ft.launchers.slurm.launcher import StepProcess

TIMEOUT = 20.0
SLEEP = ["sleep", "60"]
LET_SECONDS = 0.5
"""How long another thread may continue: nothing tells that it waits for this one."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[LocalProcess]]:
    """Processes to be killed at the end, whatever the test does."""
    handles: list[LocalProcess] = []
    yield handles
    for handle in handles:
        handle.kill()
        handle.join(TIMEOUT)


def spawn(
    started: list[LocalProcess], tmp_path: Path, argv: list[str], stdin: bytes | None = None
) -> LocalProcess:
    handle = LocalProcess.spawn("n0", argv, os.environ, tmp_path / "logs" / "log", stdin)
    started.append(handle)
    return handle


def in_shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def first_line(log: Path, process: LocalProcess) -> str:
    """Await the first line in a log by following it with tail, which ends with the process."""
    command = ["tail", "-n", "+1", "-f", f"--pid={process.pid}", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        ready = select.select([tail.stdout], [], [], TIMEOUT)[0]
        line = tail.stdout.readline() if ready else b""
        tail.kill()
    assert line.endswith(b"\n"), f"{process} wrote no line within {TIMEOUT} s"
    return line.decode().strip()


def test_stdin_is_no_longer_than_a_pipe(tmp_path: Path, started: list[LocalProcess]) -> None:
    with pytest.raises(ValueError, match="4096"):
        spawn(started, tmp_path, ["cat"], stdin=bytes(4097))


def test_waiting_holds_no_descriptor_afterwards(
    tmp_path: Path, started: list[LocalProcess]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(spawn(started, tmp_path, ["true"]).wait())
    assert len(os.listdir("/proc/self/fd")) == before


def test_kill_reaches_the_whole_session_also_after_its_leader(
    tmp_path: Path, started: list[LocalProcess]
) -> None:
    script = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=os.setpgrp)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)"
    )
    process = spawn(started, tmp_path, [sys.executable, "-c", script])
    child = int(first_line(tmp_path / "logs" / "log", process))
    assert process.join(TIMEOUT) == 0
    pidfd = os.pidfd_open(child)
    assert not procfs.ended(pidfd)
    process.kill()
    assert procfs.ended(pidfd, TIMEOUT)
    os.close(pidfd)


def test_join_says_for_whom_it_waited(tmp_path: Path, started: list[LocalProcess]) -> None:
    process = spawn(started, tmp_path, SLEEP)
    with pytest.raises(ControlPlaneError, match=f"process {process.pid} on n0"):
        process.join(0.01)


STARTER = """
import os, signal, sys
from pathlib import Path
from megatron_ft.launchers.process import LocalProcess, open_session
process = LocalProcess.spawn("n0", ["sleep", "60"], os.environ, Path(sys.argv[1]))
print(process.pid, process.start_time, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_survives_the_sigkill_of_its_starter(
    tmp_path: Path, started: list[LocalProcess]
) -> None:
    starter = subprocess.run(
        [sys.executable, "-c", STARTER, str(tmp_path / "log")],
        stdout=subprocess.PIPE, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert starter.returncode == -signal.SIGKILL
    pid, start_time = map(int, starter.stdout.split())
    orphan = LocalProcess.attach("n0", pid, start_time)
    started.append(orphan)
    assert orphan.alive()
    orphan.kill()
    assert orphan.join(TIMEOUT) == UNKNOWN_EXIT


def test_stat_of_a_process_with_a_nasty_name(tmp_path: Path, started: list[LocalProcess]) -> None:
    program = tmp_path / "a) R 1 ("
    program.symlink_to("/bin/sleep")
    process = spawn(started, tmp_path, [str(program), "60"])
    stat = procfs.read_stat(process.pid)
    assert stat is not None and stat.session == stat.group == process.pid


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("of_slurm", [False, True])
def test_a_signal_reaches_no_stranger_when_another_thread_reaps(
    tmp_path: Path,
    started: list[LocalProcess],
    monkeypatch: pytest.MonkeyPatch,
    of_slurm: bool,
    waits: bool,
) -> None:
    """The descriptor that is signalled through is closed by who reaps, and given out anew."""
    stranger = spawn(started, tmp_path, SLEEP)
    process = spawn(started, tmp_path, SLEEP)
    if of_slurm:
        process = StepProcess(Allocation("7", ["n0"], {}), "n0", process.pid)
    strangers, own = os.pidfd_open(stranger.pid), os.pidfd_open(process.pid)
    reaper = threading.Thread(target=process.join, args=(TIMEOUT,))
    real, ended, waiting = signal.pidfd_send_signal, procfs.ended, threading.Event()

    def watched(pidfd: int, timeout_seconds: float = 0.0) -> bool:
        if timeout_seconds == TIMEOUT:
            waiting.set()
        return ended(pidfd, timeout_seconds)

    def reaped_before(pidfd: int, number: int) -> None:
        monkeypatch.undo()
        real(own, signal.SIGKILL)
        assert ended(own, TIMEOUT)
        if not waits:
            reaper.start()
        reaper.join(LET_SECONDS)
        if not reaper.is_alive():
            os.dup2(strangers, pidfd)
        real(pidfd, number)

    monkeypatch.setattr(procfs, "ended", watched)
    if waits:
        reaper.start()
        assert waiting.wait(TIMEOUT), "nobody waits for the process"
    monkeypatch.setattr(signal, "pidfd_send_signal", reaped_before)
    process.kill()
    reaper.join(TIMEOUT)
    assert not reaper.is_alive() and not process.alive()
    assert not procfs.ended(strangers, LET_SECONDS), "a stranger got the signal"
    os.close(strangers)
    os.close(own)


def test_who_comes_to_wait_while_another_thread_reaps_learns_the_status(
    tmp_path: Path, started: list[LocalProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = spawn(started, tmp_path, SLEEP)
    real, reaper = os.dup, threading.Thread(target=process.join, args=(TIMEOUT,))

    def reaped_before(pidfd: int) -> int:
        monkeypatch.undo()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert procfs.ended(pidfd, TIMEOUT)
        reaper.start()
        reaper.join(LET_SECONDS)
        return real(pidfd)

    monkeypatch.setattr(os, "dup", reaped_before)
    assert asyncio.run(asyncio.wait_for(process.wait(), TIMEOUT)) == -signal.SIGKILL
    reaper.join(TIMEOUT)
    assert not reaper.is_alive()


def test_of_a_step_no_thread_sees_the_status_that_srun_gave(
    tmp_path: Path, started: list[LocalProcess]
) -> None:
    """srun makes a 0 of a lost node: a trainer that had ended well."""
    seen: Future[int] = Future()

    class OfALostNode(Allocation):
        def __init__(self) -> None:
            """Nothing is asked of Slurm."""

        def left(self, *, fresh: bool = False) -> frozenset[str]:
            assert fresh, "an answer from before the loss would do"
            other = threading.Thread(target=lambda: seen.set_result(process.join(TIMEOUT)))
            other.start()
            other.join(LET_SECONDS)
            return frozenset()

    child = open_session("n0", ["true"], os.environ, tmp_path / "log")
    process = StepProcess(OfALostNode(), "n0", child.pid, child)
    started.append(process)
    assert process.join(TIMEOUT) == -signal.SIGKILL
    assert seen.result(TIMEOUT) == -signal.SIGKILL


def test_what_a_disk_delivers_to_this_process_is_counted(tmp_path: Path) -> None:
    size, path = 1 << 20, tmp_path / "file"
    path.write_bytes(os.urandom(size))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        counts = [procfs.storage_bytes_read()]
        for _ in range(2):
            os.pread(descriptor, size, 0)
            counts.append(procfs.storage_bytes_read())
    finally:
        os.close(descriptor)
    if None in counts or counts[0] == counts[1]:
        pytest.skip("this kernel does not count, or the folder is in memory")
    first, read, cached = counts
    assert read - first >= size and cached == read  # type: ignore[operator]
