"""Handles of processes, what can go wrong with them, and processes of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_ft.core import procfs
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import ControlPlaneError, MissingEnvironmentError

# Signal numbers end at 64, so no process that was reaped can have this status.
UNKNOWN_EXIT = -128
"""Exit status of a process that somebody else started: only its parent learns the real one."""


class NodeUnreachable(ControlPlaneError):
    """The node is lost, or cannot be reached now; nothing was started there."""


class ProcessGoneError(ControlPlaneError):
    """The process to attach to has ended, or its number belongs to another process by now."""


class Placement(NamedTuple):
    """One process of a world: where it runs, what it runs, and its complete environment."""

    node: str
    argv: Sequence[str]
    env: Mapping[str, str]


class ProcessHandle(Protocol):
    """One process, or one MPI world, that a launcher started or attached to."""

    @property
    def pid(self) -> int:
        """Process number on its node; for a world, that of its MPI launcher.

        Where a launcher starts it by a command that runs as long as it does, of that command.
        """

    @property
    def node(self) -> str:
        """The node it runs on; empty for a world, which belongs to no node."""

    @property
    def start_time(self) -> int:
        """Kernel clock ticks from boot to its start: with the pid it names a process for good."""

    async def wait(self) -> int:
        """Its exit status once it has ended; any number of tasks may wait.

        A status below zero is the number of the signal that killed it, as in
        ``subprocess``.  Of a process that was attached to it is UNKNOWN_EXIT.
        """

    def kill(self) -> None:
        """SIGKILL to it and to all it started; returns at once, harmless when it has ended."""

    def alive(self) -> bool:
        """True if it still runs; a zombie does not."""


# The smallest a pipe can be: what fits is written before the process exists, without blocking.
STDIN_LIMIT = 4096


class LocalProcess:
    """Handle of a process on this machine; see ProcessHandle for what it promises.

    The kernel gives an exit status only to the parent: ``spawn`` knows it, ``attach``
    does not and reports UNKNOWN_EXIT.  Threads may share a handle.
    """

    def __init__(
        self,
        node: str,
        pid: int,
        child: subprocess.Popen[bytes] | None = None,
        tree: str = "",
    ) -> None:
        """Watch ``pid``; ``child`` is given when this process is its parent.

        With ``tree``, the value of environment.TREE that it was given, all processes that have
        inherited this end with it.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ProcessGoneError(f"process {pid} on {node or 'no node'} has ended") from error
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)
        stat = procfs.read_stat(pid)
        if stat is None:
            raise ProcessGoneError(f"process {pid} on {node or 'no node'} has ended")
        self._node, self._pid, self._child, self._stat = node, pid, child, stat
        self._exit: int | None = None
        self._tree = tree
        # Reaping closes the pidfd; its number may be reused.
        self._lock = threading.RLock()

    @classmethod
    def spawn(
        cls,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start a process in a session of its own; errors as of ``open_session``."""
        child = open_session(node, argv, env, log_path, stdin)
        return cls(node, child.pid, child, env.get(TREE, ""))

    @classmethod
    def attach(cls, node: str, pid: int, start_time: int | None = None) -> LocalProcess:
        """Watch a process that somebody else started.

        Raises ProcessGoneError if it has ended or did not start at ``start_time``.
        """
        process = cls(node, pid)
        process.require_start(start_time)
        return process

    def require_start(self, start_time: int | None) -> None:
        """ProcessGoneError if it has ended or did not start at ``start_time``."""
        if not self.alive() or start_time not in (None, self.start_time):
            raise ProcessGoneError(f"process {self._pid} of node {self._node} has ended")

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def node(self) -> str:
        return self._node

    @property
    def start_time(self) -> int:
        """Kernel clock ticks from boot to its start."""
        return self._stat.start_time

    def alive(self) -> bool:
        with self._lock:
            if self._exit is None and procfs.ended(self._pidfd):
                self._reap()
            return self._exit is None

    async def wait(self) -> int:
        """Its exit status once it has ended: below zero a signal, UNKNOWN_EXIT if not ours."""
        if (own := self._watched()) is not None:
            await _end_of(own)
        if self._tree:
            await asyncio.to_thread(procfs.kill_matching, self._in_tree, f"what {self} started")
        return self._reap()

    def join(self, timeout_seconds: float) -> int:
        """Do as ``wait`` without an event loop; ControlPlaneError after the timeout."""
        if (own := self._watched()) is not None:
            try:
                if not procfs.ended(own, timeout_seconds):
                    raise ControlPlaneError(f"{self} has not ended within {timeout_seconds:g} s")
            finally:
                os.close(own)
        return self._reap()

    def kill(self) -> None:
        """SIGKILL to it, to its session or process group where it leads one, and to its tree."""
        if self._tree:
            procfs.close_all(procfs.signal_matching(self._in_tree))
        stat = procfs.read_stat(self._pid)
        if stat is not None and stat.start_time != self.start_time:
            return  # its number is another process's
        self._send(signal.SIGKILL)
        if self._stat.session == self._pid:
            procfs.close_all(procfs.signal_matching(self._in_session))
        elif self._stat.group == self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def __repr__(self) -> str:
        state = "running" if self._exit is None else f"ended with {self._exit}"
        return f"<process {self._pid} on {self._node or 'no node'}, {state}>"

    def _send(self, number: int) -> bool:
        """A signal to it alone; whether it still ran."""
        with self._lock:
            running = self.alive()
            if running:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)
            return running

    def _watched(self) -> int | None:
        """A descriptor of the caller's own by which to see its end; None once it has ended."""
        with self._lock:
            return os.dup(self._pidfd) if self.alive() else None

    def _reap(self) -> int:
        with self._lock:
            if self._exit is None:
                self._exit = self._status()
                self._close()
            return self._exit

    def _status(self) -> int:
        return UNKNOWN_EXIT if self._child is None else self._child.wait()

    def _in_session(self, pid: int) -> bool:
        stat = procfs.read_stat(pid)
        return stat is not None and stat.session == self._pid and not stat.ended

    def _in_tree(self, pid: int) -> bool:
        stat = procfs.read_stat(pid)
        running = stat is not None and not stat.ended
        return running and procfs.read_environment(pid).get(TREE) == self._tree


def open_session(
    node: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    stdin: bytes | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a new session, output appended to ``log_path`` (made with mode 0600).

    No parent-death signal and no terminal: it outlives the process that starts it.
    MissingEnvironmentError if the program cannot be run, ControlPlaneError if the machine lacks
    what it takes just now: room for a log, descriptors, processes.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(log_path, flags, 0o600)
        try:
            return _popen(argv, env, log, stdin)
        finally:
            os.close(log)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise MissingEnvironmentError(
            f"cannot start {argv[0]!r} on node {node!r}: {error.strerror}; "
            "give a program that exists there and may be run"
        ) from error
    except OSError as error:
        raise ControlPlaneError(
            f"cannot start {argv[0]!r} on node {node!r} just now, output to {log_path}: "
            f"{error.strerror}"
        ) from error


def _popen(
    argv: Sequence[str], env: Mapping[str, str], log: int, stdin: bytes | None
) -> subprocess.Popen[bytes]:
    source = _filled_pipe(stdin)
    try:
        return subprocess.Popen(
            list(argv), env=dict(env), stdin=source, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(source)


async def _end_of(pidfd: int) -> None:
    """Await the end of a process, then close ``pidfd``; a loop has one reader per descriptor."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(pidfd, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _filled_pipe(content: bytes | None) -> int:
    if content is None:
        return os.open(os.devnull, os.O_RDONLY)
    if len(content) > STDIN_LIMIT:
        raise ValueError(f"stdin of {len(content)} bytes; at most {STDIN_LIMIT} can be passed")
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, content)
    finally:
        os.close(write_end)
    return read_end
