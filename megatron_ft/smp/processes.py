"""Processes that write into a node's arenas or read them, watched through pidfds.

A pidfd names one process for ever: unlike a pid it cannot be reused, and it becomes
readable exactly when the process has died.  The list of writers is kept in a file next to the
arenas, so that a restarted SMP knows which processes it has to kill.  Readers are never killed,
and an SMP that is restarted has forgotten them; they see it by the header of their slot.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_ft.core import private_files, procfs
from megatron_ft.core.errors import UNREADABLE, ControlPlaneError, MegatronFTError
from megatron_ft.smp.store import SUFFIX

log = logging.getLogger(__name__)

WRITERS_NAME = "writers.json"
STALL_SECONDS = 120.0
"""A reader that has not run for so long holds no slot any more.

One that is merely slow, or capped, runs between any two of its pieces.
"""

DRAIN = "drain"
"""Role of a process that writes to disk for the supervisor, and to no arena.

Arenas are mapped read-only there.  What such a process still does once it was killed is to end
the system call that it is in.
"""

DRAIN_END_SECONDS = 1.0
"""Longest wait for the end of a drain that was killed.  A disk that hangs may keep it for ever."""

SURVIVOR = "survivor"
"""Role of a process whose trainer can be ended and started again inside it (survivors.py).

While it trains, the same process is a writer of the role "trainer" too.
"""


class WriterProcess(msgspec.Struct, frozen=True):
    """One registered process.  ``who`` is a shard id (trainer), a world (encoder), or any name.

    ``start_time`` is field 22 of /proc/<pid>/stat (clock ticks since boot): it tells the
    process from a later one with the same pid.  ``identity`` is its socket's.
    """

    role: str
    who: str
    pid: int
    start_time: int
    identity: bytes


def check_process(pid: int) -> None:
    """ControlPlaneError unless this is a living process of this user's, other than this one."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError as error:
        raise ControlPlaneError(f"process {pid} is gone") from error
    if owner != os.geteuid() or pid == os.getpid():
        raise ControlPlaneError(f"process {pid} is not one of this user's trainers or encoders")


def open_pidfd(pid: int) -> int:
    """A pidfd; ProcessLookupError also for a number that is a thread's."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ProcessLookupError(pid) from error
        raise


def start_time_of(pid: int) -> int:
    """Start time of a live process; ProcessLookupError if there is none."""
    stat = procfs.read_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return stat.start_time


def open_started(pid: int, start_time: int) -> int:
    """A pidfd of the process that started then; ProcessLookupError if that one is gone."""
    pidfd = open_pidfd(pid)
    try:
        # Asked after the pidfd is held: a number that was given out again is another process.
        if start_time_of(pid) != start_time:
            raise ProcessLookupError(pid)
    except ProcessLookupError:
        os.close(pidfd)
        raise
    return pidfd


class Writers:
    """Registry of live writers.

    ``on_gone`` is called once for each, from the event loop, when it has died or was released.
    """

    def __init__(self, directory: Path, on_gone: Callable[[WriterProcess], None]) -> None:
        self._path = directory / WRITERS_NAME
        self._on_gone = on_gone
        self._pidfds: dict[WriterProcess, int] = {}
        self._gone: dict[WriterProcess, asyncio.Event] = {}

    def all(self) -> list[WriterProcess]:
        return list(self._pidfds)

    def find(self, role: str, who: str) -> WriterProcess | None:
        return next((w for w in self._pidfds if (w.role, w.who) == (role, who)), None)

    def add(self, role: str, who: str, pid: int, identity: bytes) -> WriterProcess:
        """Watch a process.

        ControlPlaneError if it is dead already, not this user's, or this one itself, which
        would be killed by the next fence.  One that cannot be written down is not watched: the
        next SMP would not fence it.
        """
        check_process(pid)
        writer = WriterProcess(role, who, pid, start_time_of(pid), identity)
        self._watch(writer)
        try:
            self.save()
        except (OSError, MegatronFTError):
            self._forget(writer)
            raise
        return writer

    def adopt(self) -> list[WriterProcess]:
        """Watch again what an earlier SMP watched.  Returns those that have died since."""
        gone = []
        for writer in self._stored():
            try:
                self._watch(writer)
            except ProcessLookupError:
                gone.append(writer)
        self.save()
        return gone

    async def kill(self, victims: list[WriterProcess], timeout: float) -> None:
        """SIGKILL and wait until each pidfd has signalled, or hangs and can do no harm.

        ControlPlaneError names those that are still there after ``timeout`` seconds.
        """
        waits = {w: self._gone[w] for w in victims if w in self._pidfds}
        for writer in waits:
            self.signal(writer, signal.SIGKILL)
        short = min(timeout, DRAIN_END_SECONDS)
        for seconds in (short, timeout - short):
            await _all_set(waits.values(), seconds)
            hanging = self.hanging()
            waits = {w: e for w, e in waits.items() if not e.is_set() and w not in hanging}
        if waits:
            left = [f"{w.role} {w.who} (pid {w.pid})" for w in waits]
            raise ControlPlaneError(f"still alive {timeout:.0f} s after SIGKILL: {', '.join(left)}")

    def hanging(self) -> list[WriterProcess]:
        """Drains that were killed and that the kernel holds, as when their disk does not answer.

        They run no instruction of theirs any more, so nobody waits for them.
        """
        return [w for w in self._pidfds if w.role == DRAIN and procfs.killed(w.pid)]

    def running(self) -> list[WriterProcess]:
        """The living writers without those that hang."""
        hanging = self.hanging()
        return [writer for writer in self._pidfds if writer not in hanging]

    def gone(self, writer: WriterProcess) -> asyncio.Event:
        return self._gone[writer]

    def signal(self, writer: WriterProcess, number: int) -> None:
        """Send a signal; one that has died gets none."""
        if writer in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[writer], number)

    def _watch(self, writer: WriterProcess) -> None:
        pidfd = open_started(writer.pid, writer.start_time)
        self._pidfds[writer] = pidfd
        self._gone[writer] = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self.release, writer)

    def release(self, writer: WriterProcess) -> None:
        """End the watch of a process that has ended, or provably writes no more in this role."""
        gone = self._forget(writer)
        try:
            self.save()
        except (OSError, MegatronFTError) as error:
            # The next SMP finds it in the old list, and that it is dead, or kills it.
            log.warning("%s %s stays in %s: %s", writer.role, writer.who, self._path, error)
        self._on_gone(writer)
        gone.set()

    def _forget(self, writer: WriterProcess) -> asyncio.Event:
        """Watch it no more; the event that ``kill`` waits for."""
        pidfd = self._pidfds.pop(writer)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        return self._gone.pop(writer)

    def _stored(self) -> list[WriterProcess]:
        # The list is written before the first arena is made.
        if not self._path.exists() and not any(self._path.parent.glob(f"*{SUFFIX}")):
            return []
        try:
            raw = private_files.read_file(self._path)
            return msgspec.json.decode(raw, type=list[WriterProcess])
        except (FileNotFoundError, *UNREADABLE) as error:
            raise ControlPlaneError(
                f"{self._path} is damaged ({error}): the processes that may write to the arenas "
                "next to it are unknown"
            ) from error

    def save(self) -> None:
        private_files.rewrite_file(self._path, msgspec.json.encode(list(self._pidfds)))


async def _all_set(events: Collection[asyncio.Event], seconds: float) -> None:
    """Wait until all events are set, for at most so long."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    if waits:
        _, left = await asyncio.wait(waits, timeout=seconds)
        for wait in left:
            wait.cancel()


class Readers:
    """Live readers by name.  ``on_death`` is called with the name, from the event loop.

    ``pids`` are the processes of those that are watched.
    """

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self.pids: dict[str, int] = {}
        self._on_death = on_death
        self._pidfds: dict[str, int] = {}

    def watch(self, reader: str, pid: int) -> None:
        """Watch a process under this name; ControlPlaneError if it is dead."""
        self.forget(reader)
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError as error:
            raise ControlPlaneError(f"process {pid} is gone") from error
        self._pidfds[reader], self.pids[reader] = pidfd, pid
        asyncio.get_running_loop().add_reader(pidfd, self._died, reader)

    def forget(self, reader: str) -> None:
        """Stop watching a reader; an unknown one is ignored."""
        if self.pids.pop(reader, None) is not None:
            pidfd = self._pidfds.pop(reader)
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _died(self, reader: str) -> None:
        self.forget(reader)
        self._on_death(reader)


def switches(pid: int) -> int:
    """Context switches of the process's main thread; -1 if the process is gone.

    A thread that waits in one system call, or is stopped, stays at its number.
    """
    status = procfs.read_status(pid)
    names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return sum(int(status[name]) for name in names) if status else -1


class Stalls:
    """Polls readers for progress; ``count`` is what changes while a process runs."""

    def __init__(
        self, seconds: float = STALL_SECONDS, count: Callable[[int], int] = switches
    ) -> None:
        self._seconds, self._count = seconds, count
        self._seen: dict[str, tuple[int, float]] = {}

    def poll(self, readers: Mapping[str, int], now: float) -> list[str]:
        """Those of ``readers``, by name with their pids, that stall; each is named once."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in readers}
        stalled = []
        for name, pid in readers.items():
            count = self._count(pid)
            known, since = self._seen.get(name, (-1, now))
            if count != known:
                self._seen[name] = count, now
            elif now - since >= self._seconds:
                stalled.append(name)
                self._seen[name] = count, float("inf")
        return stalled
