"""Page of one trainer's heartbeats: a small file in its node's memory that the SMP reads.

Storing a heartbeat costs the training thread about a microsecond: no system call, no message, no
lock.  The layout is little-endian: a sequence number, the fields of ``Pulse`` in their
order, the sequence number again (a reader that meets a store half done sees two different
ones), and the time of the last beat and ``work``, which another thread stores.  Behind these is a
ring of records of 96 bytes, one for each of the last calls of collectives (``Call``).
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
_BEAT = struct.Struct("<dd")
FILE_BYTES = _FIELDS.size + _BEAT.size
CALL = struct.Struct("<QQqqdd24s24s")
CALL_LEFT = struct.Struct("<d")
CALL_LEFT_AT = 40
CALLS = 128
"""Records in the ring."""
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


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a collective: ``number`` of all in this process, ``sequence`` of its group.

    The sequence is 0 for what only two ranks take part in.  ``size`` is in bytes, -1 if unknown;
    ``iteration`` had ended before it; ``entered`` and ``left`` are times of the node's monotonic
    clock, ``left`` 0 as long as the call has not returned.
    """

    number: int
    sequence: int
    size: int
    iteration: int
    entered: float
    left: float
    name: str
    group: str

    def __str__(self) -> str:
        """The call in a form for people."""
        number = f" #{self.sequence}" if self.sequence else ""
        return f"{self.name}{number} of group {self.group}"


GONE = "X"
"""The kernel's letter for a process that has ended (proc(5))."""


class PulseReport(Pulse):
    """One trainer's heartbeats as its node sees them; what is added is in seconds.

    ``idle`` is how long it has passed no mark, ``quiet`` how long its watching thread has not
    run, ``state`` the kernel's letter for its process (proc(5)).  ``oom_kills`` is how often the
    kernel's OOM killer has struck in its memory cgroup since it was first seen there, -1 if that
    cannot be read.  Of one that has ended (GONE) all is as of its end.  ``calls`` are its last
    calls of collectives, the newest last, where it has ended or passes no mark.  ``work`` is the
    usual time of an iteration without that in collectives which the page records, 0 until known.
    """

    idle: float = 0.0
    quiet: float = 0.0
    state: str = ""
    oom_kills: int = -1
    calls: tuple[Call, ...] = ()
    work: float = 0.0


_STORED = attrgetter(*(name for name in Pulse.__struct_fields__ if name != "beat"))


def pulse_path(folder: Path, pid: int) -> Path:
    """The file of the trainer with this process number."""
    return folder / f"pulse-{pid}"


def stacks_path(folder: Path, pid: int) -> Path:
    """The file to which that trainer writes its stacks."""
    return folder / f"stacks-{pid}"


class PulseFile:
    """The trainer's side.  ``store`` belongs to the training thread, ``beat`` to another one.

    The ring of calls in ``memory`` is written by trainer/calls.py, which adds up in ``waited`` the
    seconds spent in them; ``iteration`` was stored last.
    """

    def __init__(self, path: Path) -> None:
        """Make the file; OSError or UntrustedFileError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        descriptor = private_files.open_file(path, flags)
        try:
            # Not a hole, which would be a SIGBUS on a full tmpfs.
            size = FILE_BYTES + CALLS * CALL.size
            os.posix_fallocate(descriptor, 0, size)
            self.memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._sequence = 0
        self.iteration, self.waited = -1, 0.0

    def store(self, pulse: Pulse) -> None:
        """Replace everything but the beat."""
        self._sequence += 1
        self.iteration = pulse.iteration
        _FIELDS.pack_into(self.memory, 0, self._sequence, *_STORED(pulse), self._sequence)

    def beat(self, now: float, work: float = 0.0) -> None:
        """Record that this process runs, and that its interpreter lets threads run."""
        _BEAT.pack_into(self.memory, _FIELDS.size, now, work)

    def close(self) -> None:
        """Unmap it; the file stays until the SMP has seen the process end."""
        self.memory.close()


def read_pulse(path: Path) -> PulseReport | None:
    """The content that a trainer stored last; None if there is no file, or nothing whole in it.

    What its node sees beside it is not filled in.
    """
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
                found = PulseReport(*fields)
                found.beat, found.work = _BEAT.unpack_from(raw, _FIELDS.size)
                return found
        return None
    finally:
        os.close(descriptor)


def read_calls(path: Path, most: int) -> tuple[Call, ...]:
    """The newest calls of collectives in the page, the newest last; none if there is no page.

    One whose record is just being written is left out or half as it was.
    """
    try:
        descriptor = private_files.open_file(path)
    except OSError:
        return ()
    try:
        raw = os.pread(descriptor, CALLS * CALL.size, FILE_BYTES)
    finally:
        os.close(descriptor)
    raw = raw[: len(raw) // CALL.size * CALL.size]
    found = sorted(record for record in CALL.iter_unpack(raw) if record[0])[-most:]
    return tuple(
        Call(*numbers, *(word.rstrip(b"\0").decode(errors="replace") for word in (name, group)))
        for *numbers, name, group in found
    )
