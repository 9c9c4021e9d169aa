"""Heartbeats of a node's trainers as its SMP reads them, and stacks that they write on request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_ft.arena.limits import oom_counter, oom_kills
from megatron_ft.core import private_files, procfs
from megatron_ft.core.errors import UntrustedFileError
from megatron_ft.rpc.heartbeat_page import (
    DUMP_SIGNAL,
    GONE,
    PulseReport,
    TrainerPhase,
    pulse_path,
    read_calls,
    read_pulse,
    stacks_path,
)
from megatron_ft.smp.processes import WriterProcess, Writers

log = logging.getLogger(__name__)

MOST_STACK_BYTES = 64 << 10
"""Longest stacks of one rank; 100 frames in 100 threads would be some ten times as long."""

QUIET_SECONDS, MOST_CALLS = 1.0, 16
"""Calls of collectives are reported of ranks that have passed no mark for so long, the last few."""

_SETTLED_SECONDS = 0.2
_POLL_SECONDS = 0.05
_PHASES = {phase.value: phase.name.lower() for phase in TrainerPhase}
STACK_SECONDS = 3.0
"""Longest wait for stacks: a process that sleeps in the kernel writes none."""


class NodeHeartbeats:
    """Looks at the trainers among ``writers``, whose files are in ``folder``."""

    def __init__(self, folder: Path, writers: Writers) -> None:
        self._folder, self._writers = folder, writers
        self._last: dict[str, PulseReport] = {}
        self._counters: dict[int, tuple[Path, int | None]] = {}

    def reports(self) -> dict[str, PulseReport]:
        """Shard id to its trainer's heartbeats, for trainers that have a page of them.

        Those that have ended since ``begin_incarnation`` are among them.
        """
        found = dict(self._last)
        for writer in self._trainers():
            pulse = self._read(writer)
            if pulse is not None:
                found[writer.who] = self._report(pulse, writer.pid)
        return found

    def begin_incarnation(self) -> None:
        """Forget the trainers that have ended."""
        self._last.clear()

    async def stacks(self) -> dict[str, str]:
        """Shard id to the stacks of its threads; empty text where none came."""
        asked = {}
        for writer in self._trainers():
            pulse = self._read(writer)
            # Unless the trainer catches the signal (proc(5), SigCgt), it would end it.
            caught = int(procfs.read_status(writer.pid).get("SigCgt", "0"), 16)
            if pulse is not None and pulse.dumps and caught >> (DUMP_SIGNAL - 1) & 1:
                asked[writer.who] = writer
        for writer in asked.values():
            with suppress(OSError, UntrustedFileError):
                os.close(self._open(writer, os.O_WRONLY | os.O_TRUNC))
                self._writers.signal(writer, DUMP_SIGNAL)
                self._writers.signal(writer, signal.SIGCONT)
        await self._settled(asked)
        return {shard: self._written(writer) for shard, writer in asked.items()}

    def ended(self, writer: WriterProcess) -> None:
        """Remove the files of a trainer that is gone; log where one was that was killed."""
        pulse = self._read(writer)
        if pulse is not None:
            self._last[writer.who] = self._report(pulse, writer.pid)
            self._last[writer.who].state = GONE
        self._counters.pop(writer.pid, None)
        if pulse is not None and pulse.phase != TrainerPhase.ENDED:
            log.warning(
                "rank %d (%s, pid %d) ended after iteration %d, %.1f s after its last mark, in "
                "phase %s", pulse.rank, writer.who, writer.pid, pulse.iteration,
                time.monotonic() - pulse.marked, _PHASES.get(pulse.phase, "unknown"),
            )  # fmt: skip
        for path in (pulse_path(self._folder, writer.pid), stacks_path(self._folder, writer.pid)):
            with suppress(OSError):
                path.unlink()

    def _trainers(self) -> list[WriterProcess]:
        return [writer for writer in self._writers.all() if writer.role == "trainer"]

    def _read(self, writer: WriterProcess) -> PulseReport | None:
        try:
            return read_pulse(pulse_path(self._folder, writer.pid))
        except UntrustedFileError:
            return None

    def _report(self, pulse: PulseReport, pid: int) -> PulseReport:
        now, stat = time.monotonic(), procfs.read_stat(pid)
        stuck = now - pulse.marked > QUIET_SECONDS or stat is None or not stat.has_program
        return msgspec.structs.replace(
            pulse,
            idle=max(0.0, now - pulse.marked) if pulse.marked else 0.0,
            quiet=max(0.0, now - pulse.beat) if pulse.beat else 0.0,
            state=stat.state if stat else GONE,
            oom_kills=self._oom_kills(pid, stat),
            calls=read_calls(pulse_path(self._folder, pid), MOST_CALLS) if stuck else (),
        )

    def _oom_kills(self, pid: int, stat: procfs.ProcessStat | None) -> int:
        """Kills in the trainer's cgroup since it was first seen in this one."""
        known = self._counters.get(pid)
        # A process that ends is in the root's, or in none.
        counter = oom_counter(pid) if stat is not None and stat.has_program else None
        if counter is not None and (known is None or known[0] != counter):
            # If it ends meanwhile, what was read may not have been its own.
            again = procfs.read_stat(pid)
            if again is not None and again.has_program:
                known = self._counters[pid] = counter, oom_kills(counter)
        count = oom_kills(known[0]) if known is not None else None
        return -1 if known is None or count is None or known[1] is None else count - known[1]

    def _open(self, writer: WriterProcess, flags: int) -> int:
        return private_files.open_file(stacks_path(self._folder, writer.pid), flags)

    async def _settled(self, asked: Mapping[str, WriterProcess]) -> None:
        """Wait until all have written and none has written more for a moment."""
        deadline = time.monotonic() + STACK_SECONDS
        sizes: dict[str, int] = {}
        since = time.monotonic()
        while time.monotonic() < deadline:
            now = {shard: len(self._written(writer)) for shard, writer in asked.items()}
            if now != sizes:
                sizes, since = now, time.monotonic()
            elif all(now.values()) and time.monotonic() - since > _SETTLED_SECONDS:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _written(self, writer: WriterProcess) -> str:
        try:
            descriptor = self._open(writer, os.O_RDONLY)
        except (OSError, UntrustedFileError):
            return ""
        try:
            return os.pread(descriptor, MOST_STACK_BYTES, 0).decode(errors="replace")
        finally:
            os.close(descriptor)
