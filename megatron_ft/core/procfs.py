"""Finding and ending processes through /proc, safe against reuse of process numbers."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_ft.core.errors import ControlPlaneError

PROC = Path("/proc")

# include/linux/sched.h
_PF_EXITING = 0x00000004
_PF_KTHREAD = 0x00200000

_EXEC_SECONDS = 1.0
_EXEC_POLL_SECONDS = 0.0005


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that we need (see proc(5))."""

    state: str
    group: int
    session: int
    flags: int
    start_time: int

    @property
    def ended(self) -> bool:
        """True if only the exit status of the process is left."""
        return self.state in "ZX"

    @property
    def has_program(self) -> bool:
        """True if the process runs a program: no kernel thread, and not exiting."""
        return not self.ended and not self.flags & (_PF_EXITING | _PF_KTHREAD)


def read_stat(pid: int | Literal["self"]) -> ProcessStat | None:
    """Read /proc/PID/stat of a process; None if no process has this number."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    group, session, flags, start_time = (int(fields[i]) for i in (2, 3, 6, 19))
    return ProcessStat(fields[0], group, session, flags, start_time)


def read_status(pid: int | Literal["self"]) -> dict[str, str]:
    """The lines of /proc/PID/status by name (see proc(5)); empty if the process is gone."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def killed(pid: int) -> bool:
    """True if SIGKILL is pending: the process runs no more, and ends when the kernel lets it."""
    status = read_status(pid)
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return bool(pending >> (signal.SIGKILL - 1) & 1)


def storage_bytes_read() -> int | None:
    """Bytes that storage has delivered to this process, memory swapped in included (proc(5)).

    None where the kernel does not count them.
    """
    lines = _read(os.getpid(), "io").decode().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) if "read_bytes" in counts else None


def command_above(program: str) -> list[str]:
    """The command line of the nearest process above this one that runs ``program``; or none."""
    pid = os.getppid()
    while pid > 1:
        words = read_command(pid)
        if words and Path(words[0]).name == program:
            return words
        pid = int(read_status(pid).get("PPid", "0"))
    return []


def read_command(pid: int) -> list[str]:
    """The words of the command line of a process; none if it has ended."""
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def machine() -> str:
    """A name that all processes of one running kernel share, containers included."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it ended or is not ours.

    While a process changes to a new program, also just after ``Popen`` has returned, the
    kernel shows neither environment nor arguments; that is waited for.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (raw := _read(pid, "environ")) and _in_exec(pid) and time.monotonic() < deadline:
        # Nothing signals the end of exec to a process that is not its parent.
        time.sleep(_EXEC_POLL_SECONDS)
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _in_exec(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.has_program and not _read(pid, "cmdline")


def own_processes() -> Iterator[int]:
    """Numbers of all processes of this user, this process left out."""
    for entry in os.scandir(PROC):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if entry.stat().st_uid == os.geteuid():
                    yield int(entry.name)


def ended(pidfd: int, timeout_seconds: float = 0.0) -> bool:
    """True if the process behind a pidfd has ended, or ends within the time given."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_seconds) * 1000))


def signal_matching(matches: Callable[[int], bool]) -> dict[int, int]:
    """SIGKILL to every process that matches; returns pid -> pidfd, for the caller to close.

    A process that was signalled cannot fork any more, so the search ends with the first
    round that finds nobody new.
    """
    signalled: dict[int, int] = {}
    while True:
        fresh = [p for p in own_processes() if p not in signalled and matches(p)]
        opened = {pid: fd for pid in fresh if (fd := _open_matching(pid, matches)) is not None}
        if not opened:
            return signalled
        signalled.update(opened)
        for pidfd in opened.values():
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def kill_matching(
    matches: Callable[[int], bool], whom: str, timeout_seconds: float = 10.0
) -> list[int]:
    """End every process that matches; returns their numbers once all of them are dead.

    Raises ControlPlaneError naming ``whom`` and those that outlive the timeout.
    """
    deadline = time.monotonic() + timeout_seconds
    dead: list[int] = []
    while victims := signal_matching(matches):
        alive = [p for p, fd in victims.items() if not ended(fd, deadline - time.monotonic())]
        close_all(victims)
        if alive:
            raise ControlPlaneError(
                f"processes {alive} of {whom} still run {timeout_seconds:g} s after SIGKILL; "
                "they may hang in the kernel (see their state in ps)"
            )
        dead.extend(victims)
    return dead


def close_all(pidfds: dict[int, int]) -> None:
    for pidfd in pidfds.values():
        os.close(pidfd)


def _open_matching(pid: int, matches: Callable[[int], bool]) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # Asked again, because the number may have changed hands before the descriptor held it.
    if matches(pid):
        return pidfd
    os.close(pidfd)
    return None


def pid_namespace() -> int:
    """Id of this process's PID namespace (namespaces(7)); 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
