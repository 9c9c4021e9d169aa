"""Page of one trainer's heartbeats: a small file in its node's memory that the SMP reads.

Storing a heartbeat costs the training thread about a microsecond: no system call, no message, no
lock.  The layout is little-endian: a sequence number, the fields of ``Pulse`` in their
order, the sequence number again (a reader that meets a store half done sees two different
ones), and the time of the last beat, which another thread stores.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from enum import IntEnum
from operator import attrgetter
from pathlib import Path

import msgspec

from megatron_ft.core import private_files

_FIELDS = struct.Struct("<Q?qqqqqddddQ")
_BEAT = struct.Struct("<d")
FILE_BYTES = _FIELDS.size + _BEAT.size
_ATTEMPTS = 3

DUMP_SIGNAL = signal.SIGRTMIN + 9
"""Makes a trainer write its stacks.  Not SIGUSR1 or 2, which Slurm and frameworks use."""


class TrainerPhase(IntEnum):
    """Activity of a trainer, as far as its silence is concerned."""

    STARTING = 0
    TRAINING = 1
    PAUSED = 2
    """It evaluates or writes a checkpoint: no iteration ends meanwhile."""
    ENDED = 3


class Pulse(msgspec.Struct, array_like=True):
    """Content of the page; times are of the node's monotonic clock, in seconds.

    ``marks`` counts the places that it has passed (the optimizer's step, the iteration's end),
    ``marked`` is when it passed the last one, ``done`` how many iterations it has ended in this
    incarnation.  ``typical`` is an iteration's usual length, ``longest`` the longest time between
    two marks.  ``first`` is when the first iteration of this incarnation ended, 0 before.
    ``beat`` is when its watching thread last ran.
    ``dumps`` is whether it writes its stacks on DUMP_SIGNAL.
    """

    dumps: bool = False
    rank: int = 0
    phase: int = TrainerPhase.STARTING
    iteration: int = -1
    marks: int = 0
    done: int = 0
    typical: float = 0.0
    longest: float = 0.0
    marked: float = 0.0
    first: float = 0.0
    beat: float = 0.0


GONE = "X"
"""The kernel's letter for a process that has ended (proc(5))."""


class PulseReport(Pulse):
    """One trainer's heartbeats as its node sees them; what is added is in seconds.

    ``idle`` is how long it has passed no mark, ``quiet`` how long its watching thread has not
    run, ``state`` the kernel's letter for its process (proc(5)).  ``oom_kills`` is how often the
    kernel's OOM killer has struck in its memory cgroup since it was first seen there, -1 if that
    cannot be read.  Of one that has ended (GONE) all is as of its end.
    """

    idle: float = 0.0
    quiet: float = 0.0
    state: str = ""
    oom_kills: int = -1


_STORED = attrgetter(*(name for name in Pulse.__struct_fields__ if name != "beat"))


def pulse_path(folder: Path, pid: int) -> Path:
    """The file of the trainer with this process number."""
    return folder / f"pulse-{pid}"


def stacks_path(folder: Path, pid: int) -> Path:
    """The file to which that trainer writes its stacks."""
    return folder / f"stacks-{pid}"


class PulseFile:
    """The trainer's side.  ``store`` belongs to the training thread, ``beat`` to another one."""

    def __init__(self, path: Path) -> None:
        """Make the file; OSError or UntrustedFileError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        descriptor = private_files.open_file(path, flags)
        try:
            # Not a hole, which would be a SIGBUS on a full tmpfs.
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            self._map = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._sequence = 0

    def store(self, pulse: Pulse) -> None:
        """Replace everything but the beat."""
        self._sequence += 1
        _FIELDS.pack_into(self._map, 0, self._sequence, *_STORED(pulse), self._sequence)

    def beat(self, now: float) -> None:
        """Record that this process runs, and that its interpreter lets threads run."""
        _BEAT.pack_into(self._map, _FIELDS.size, now)

    def close(self) -> None:
        """Unmap it; the file stays until the SMP has seen the process end."""
        self._map.close()


def read_pulse(path: Path) -> Pulse | None:
    """The content that a trainer stored last; None if there is no file, or nothing whole in it."""
    try:
        descriptor = private_files.open_file(path)
    except OSError:
        return None
    try:
        for _ in range(_ATTEMPTS):
            raw = os.pread(descriptor, FILE_BYTES, 0)
            if len(raw) < FILE_BYTES:
                return None
            before, *fields, after = _FIELDS.unpack_from(raw)
            if before == after != 0:
                return Pulse(*fields, *_BEAT.unpack_from(raw, _FIELDS.size))
        return None
    finally:
        os.close(descriptor)
