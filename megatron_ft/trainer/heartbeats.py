"""The trainer's part of the watch: marks of its progress, a thread that beats, stacks on a signal.

All of it is stored in a page that the SMP of the node reads.  It also holds when the
first iteration ended and how long iterations take.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median

from megatron_ft.core import private_files
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import UntrustedFileError
from megatron_ft.rpc.heartbeat_page import (
    DUMP_SIGNAL,
    Pulse,
    PulseFile,
    TrainerPhase,
    pulse_path,
    stacks_path,
)

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0

FIRST_ITERATIONS = 3
"""Iterations of an incarnation that say nothing of later ones: they compile, allocate, fill
caches."""

_SMOOTHING = 0.1

WORK_WINDOW = 32
"""Iterations of which the usual work is the median: a machine that is busy for a moment is not
seen."""


class Iterations:
    """Learns from the times at which one rank passes its marks, on any clock of seconds.

    ``done`` counts ended iterations, ``typical`` smooths their length, and ``longest`` is the
    longest time between two marks; what happened in the first iterations and in pauses is in
    neither of the two, nor in ``work``, the usual length without waiting for others.
    """

    def __init__(self) -> None:
        self.done = 0
        self.typical = 0.0
        self.longest = 0.0
        self._marked: float | None = None
        self._began: float | None = None
        self._disturbed = self._stepped = False
        self._works: deque[float] = deque(maxlen=WORK_WINDOW)
        self._waited = 0.0

    @property
    def work(self) -> float:
        """Median of the last iterations; 0 until there are enough.  Any thread may ask."""
        works = list(self._works)
        return median(works) if len(works) == WORK_WINDOW else 0.0

    @property
    def marks(self) -> int:
        """Progress of training: two an iteration, the same on ranks with different models."""
        return 2 * self.done + self._stepped

    def step(self, now: float) -> None:
        self._mark(now)
        self._stepped = True

    def ended(self, now: float, waited: float = 0.0) -> float | None:
        """An iteration has ended; the next one begins.  ``waited`` is the time that all so far
        spent in collectives.  Returns its seconds, None of the first ones and of one with a pause.
        """
        self._mark(now)
        seconds = None
        if self._began is not None and not self._disturbed and self.done >= FIRST_ITERATIONS:
            seconds = now - self._began
            self._count(seconds, waited - self._waited)
        self._waited = waited
        self.done, self._began = self.done + 1, now
        self._disturbed = self._stepped = False
        return seconds

    def disturbed(self, now: float) -> None:
        self._marked, self._disturbed = now, True

    def _mark(self, now: float) -> None:
        if self._marked is not None and self.done >= FIRST_ITERATIONS:
            self.longest = max(self.longest, now - self._marked)
        self._marked = now

    def _count(self, seconds: float, waited: float) -> None:
        self._works.append(max(0.0, seconds - waited))
        change = _SMOOTHING * (seconds - self.typical)
        self.typical = self.typical + change if self.typical else seconds


class TrainerWatch:
    """Marks of one rank, stored where the SMP of its node reads them.

    Every method but ``pause`` costs the training thread some microseconds; none raises, and
    none does anything after ``close``.
    """

    def __init__(
        self, file: PulseFile | None, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.file, self._clock = file, clock
        self._pulse = Pulse(rank=rank)
        self._iterations = Iterations()
        self._ended = threading.Event()
        self._dumps = -1

    @classmethod
    def start(cls, environment: ProcessEnvironment, rank: int) -> TrainerWatch:
        """Watch this process; where that cannot be, training continues without it."""
        try:
            file = PulseFile(pulse_path(environment.node_dir, os.getpid()))
            watch = cls(file, rank)
        except (OSError, UntrustedFileError) as error:
            log.warning("no heartbeats are written, hangs will not be found: %s", error)
            return cls(None, rank)
        watch._write_stacks_on_signal(environment)
        watch._passed(watch._clock())
        threading.Thread(target=watch._beat, name="megatron-ft-watch", daemon=True).start()
        return watch

    def training(self) -> None:
        self._pulse.phase = TrainerPhase.TRAINING
        self._iterations.disturbed(self._clock())
        self._passed(self._clock())

    def restored(self) -> None:
        self._passed(self._clock())

    def step(self) -> None:
        now = self._clock()
        self._iterations.step(now)
        self._passed(now)

    def iteration_ended(self, iteration: int) -> float | None:
        """Record the end of ``iteration``; returns its seconds as ``Iterations.ended`` does."""
        now = self._clock()
        seconds = self._iterations.ended(now, 0.0 if self.file is None else self.file.waited)
        self._pulse.iteration = iteration
        self._pulse.first = self._pulse.first or now
        self._passed(now)
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context for an evaluation or a checkpoint, in which no iteration ends."""
        before = self._pulse.phase
        self._enter(
            TrainerPhase.PAUSED if before == TrainerPhase.TRAINING else TrainerPhase(before)
        )
        try:
            yield
        finally:
            if self._pulse.phase != TrainerPhase.ENDED:
                self._enter(TrainerPhase(before))

    def close(self) -> None:
        """Training is over: silence says nothing any more."""
        self._ended.set()
        self._pulse.phase = TrainerPhase.ENDED
        self._store()
        self.file = None
        if self._dumps >= 0:
            faulthandler.unregister(DUMP_SIGNAL)
            # A signal that is sent late must not end this process.
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
            os.close(self._dumps)
            self._dumps = -1

    def _enter(self, phase: TrainerPhase) -> None:
        now = self._clock()
        self._pulse.phase = phase
        self._iterations.disturbed(now)
        self._passed(now)

    def _passed(self, now: float) -> None:
        pulse, iterations = self._pulse, self._iterations
        pulse.marks, pulse.marked, pulse.done = iterations.marks, now, iterations.done
        pulse.typical, pulse.longest = iterations.typical, iterations.longest
        self._store()

    def _store(self) -> None:
        if self.file is not None:
            self.file.store(self._pulse)

    def _beat(self) -> None:
        file = self.file
        while file is not None and not self._ended.is_set():
            file.beat(time.monotonic(), self._iterations.work)
            self._ended.wait(BEAT_SECONDS)

    def _write_stacks_on_signal(self, environment: ProcessEnvironment) -> None:
        """Install the handler: C code without locks, which works while C code holds the GIL."""
        path = stacks_path(environment.node_dir, os.getpid())
        with suppress(OSError, UntrustedFileError, RuntimeError, ValueError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._dumps = private_files.open_file(path, flags)
            faulthandler.register(DUMP_SIGNAL, file=self._dumps, all_threads=True, chain=False)
            self._pulse.dumps = True
