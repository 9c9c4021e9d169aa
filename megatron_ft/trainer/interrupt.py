"""Interrupts the training function from another thread, also while it waits for other ranks.

The main thread may be in Python code, in a system call, or in C++ code that waits without Python's
lock: in a collective, or for the store in which ranks meet.  A signal reaches the first two.  For
the third the process groups are aborted and connections shut down; gloo knows no other way, and a
store's client waits for half an hour otherwise.  What waited then fails, and the signal's handler
raises ``RestartRequested`` in the place of that error.

Nothing here interrupts C code that never returns to Python: a computation, a device that hangs, a
read from storage that does not answer, a futex, a library that waits on sockets of Unix or on a
network other than TCP (MPI, UCX over InfiniBand).  gloo loses the error of a message that it has
written in part, and waits for it until the group's timeout.  Such a trainer is killed at a
deadline by its node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

INTERRUPT_SIGNAL = signal.SIGRTMIN + 10
"""Beside DUMP_SIGNAL; not one that Slurm, Python or a framework uses."""

REPEAT_SECONDS, MOST_REPEAT_SECONDS = 0.02, 0.32
"""Time until connections are shut down again, as the training function may have made new ones.

It doubles each time, up to the second.  torch makes a connection to a store until it has one, with
longer and longer pauses in between: what is disturbed too often does not come back to Python.
"""

WRITE_SECONDS = 0.5
"""Time until connections are shut down for writing too.

gloo can miss the error of a write; it never misses the end of what it reads.
"""

RAISE_SECONDS = 0.25
"""Time that code has to end after ``RestartRequested``, until it is raised once more.

A destructor, or an ``except`` without a class, may have swallowed the one before.
"""


class RestartRequested(BaseException):
    """The job restarts: the training function ends here, and is entered again.

    No Exception, so that code which continues after errors does not continue after this.
    """


class Interrupter:
    """Ends what the main thread does inside ``with interrupter:``, on request of another thread.

    Make it in the main thread.  The ``with`` statement surrounds the training function, and
    ``RestartRequested`` leaves it.  Nothing is raised outside of it: a request that comes then is
    raised as soon as the main thread enters.
    """

    def __init__(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self._lock = threading.Lock()
        self._inside = self._requested = False
        self._left = threading.Event()
        self._raise_after = 0.0
        self._kept: frozenset[int] = frozenset()
        self._thread: threading.Thread | None = None
        signal.signal(INTERRUPT_SIGNAL, self._handle)

    def interrupt(self) -> None:
        """Request it, from any thread; returns at once.

        It is repeated until the main thread has left the ``with`` statement.
        """
        with self._lock:
            self._requested = True
            if self._inside and self._thread is None:
                self._thread = threading.Thread(
                    target=self._insist, name="megatron-ft-interrupt", daemon=True
                )
                self._thread.start()

    def clear(self) -> None:
        """Forget a request that came while the main thread was outside."""
        self._requested = False

    def __enter__(self) -> None:
        self._kept = frozenset(inode for _, inode in _tcp_sockets())
        with self._lock:
            if self._requested:
                self._requested = False
                raise RestartRequested
            self._raise_after = 0.0
            self._left.clear()
            self._inside = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # First, and in this frame, in which the handler does not raise.
        self._inside = False
        with self._lock:
            thread, self._thread, self._requested = self._thread, None, False
        if thread is not None:
            # A signal that came later would break the connect of a store.
            self._left.set()
            thread.join()
            # A connection made at the last moment would have what is destroyed wait for its peer.
            _shut_connections(self._kept, socket.SHUT_RD)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, where Python runs signal handlers."""
        own = frame is not None and frame.f_code in _OWN
        if self._inside and self._requested and not own and time.monotonic() > self._raise_after:
            self._raise_after = time.monotonic() + RAISE_SECONDS
            raise RestartRequested

    def _insist(self) -> None:
        aborted: set[str] = set()
        pause = REPEAT_SECONDS
        patience = time.monotonic() + WRITE_SECONDS
        while self._inside:
            how = socket.SHUT_RD if time.monotonic() < patience else socket.SHUT_RDWR
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)
            _abort_groups(aborted)
            _shut_connections(self._kept, how)
            self._left.wait(pause)
            pause = min(2 * pause, MOST_REPEAT_SECONDS)


_OWN = (Interrupter.__enter__.__code__, Interrupter.__exit__.__code__)


def _abort_groups(aborted: set[str]) -> None:
    """Abort the process groups that are not in ``aborted``, and add them to it.

    Without effect for gloo.  NCCL's older backend wants all of them between two marks, in one
    order on every rank.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    names = dict(c10d._world.pg_names)
    groups = [
        group for group in sorted(names, key=names.__getitem__) if names[group] not in aborted
    ]
    marked = next(filter(None, map(_marked_backend, groups)), None)
    if marked is not None:
        marked._group_start()
    for group in reversed(groups):
        aborted.add(names[group])
        with suppress(RuntimeError):
            group.abort()
    if marked is not None:
        marked._group_end()


def _marked_backend(group: Any) -> Any:
    """The backend of a group that has marks around several calls; None if it has none."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(backend, "_group_start"):
            return backend
    return None


def _shut_connections(kept: frozenset[int], how: int) -> None:
    """Shut down all TCP connections of this process but those in ``kept``.

    Those of its gloo groups and stores are among them, and cannot be distinguished from others.
    The others are not needed any more: the training function that ends has opened them.
    """
    for descriptor, inode in _tcp_sockets():
        if inode not in kept:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # The number may stand for another file by now.
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(how)


def _tcp_sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each TCP socket of this process that does not listen."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                streams = connection.type == socket.SOCK_STREAM
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if tcp and streams and not listens:
                    yield int(name), os.fstat(connection.fileno()).st_ino
