"""The trainer's part of the watch: it passes marks, a thread beats, a signal writes stacks.

All of it is stored in a page that the SMP of the node reads.  Beside the marks the page says when
the first iteration ended, how long iterations take, and how much of each is the rank's own part.

In a synchronous job all ranks have the same iteration time, because the fast ones wait for the
slow ones.  A rank's own part is what is left without that wait: without the time from its own last
gradient to the optimizer's step, in which gradients are exchanged.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

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

LEARNING_STEPS = 2
"""Steps to learn the last parameter; DDP orders its buckets anew after the first step."""

FIRST_ITERATIONS = 3
"""Iterations of an incarnation that say nothing of later ones: they compile, allocate, fill
caches."""

WINDOW = 50
"""Iterations over which own parts are summed up; a window ends where the number divides."""

LEAST_OF_WINDOW = 40
"""A window with fewer iterations that count is passed over."""

_SMOOTHING = 0.1


@dataclass(frozen=True)
class WindowSummary:
    """Own parts of the iterations that end with (index + 1) * WINDOW: seconds.

    ``spread`` is their median absolute deviation.
    """

    index: int
    own: float
    spread: float


class Iterations:
    """Learns from the times at which one rank passes its marks, on any clock of seconds.

    ``done`` counts ended iterations, ``typical`` smooths their length, ``longest`` is the longest
    time between two marks, and ``window`` the newest whole window; what happened in the first
    iterations and in pauses is in none of them.
    """

    def __init__(self) -> None:
        self.done = 0
        self.typical = 0.0
        self.longest = 0.0
        self.window: WindowSummary | None = None
        self._marked: float | None = None
        self._began: float | None = None
        self._gradient: float | None = None
        self._waited: float | None = None
        self._own: list[float] = []
        self._disturbed = False
        self._stage = 0

    @property
    def marks(self) -> int:
        """Progress of training: three an iteration, the same on ranks with different models."""
        return 3 * self.done + self._stage

    def gradient(self, now: float) -> None:
        """The last gradient of a backward pass is there; with several, the last one counts."""
        self._mark(now)
        self._gradient, self._stage = now, 1

    def step(self, now: float) -> None:
        """The optimizer steps: gradients have been exchanged."""
        self._mark(now)
        self._stage = 2
        if self._gradient is not None:
            self._waited = (self._waited or 0.0) + now - self._gradient
            self._gradient = None

    def ended(self, iteration: int, now: float) -> None:
        """An iteration has ended; the next one begins."""
        self._mark(now)
        if self._began is not None and not self._disturbed:
            self._count(now - self._began)
        self.done, self._stage = self.done + 1, 0
        if (iteration + 1) % WINDOW == 0:
            self.window = summarise(iteration // WINDOW, self._own) or self.window
            self._own = []
        self._began, self._waited, self._gradient = now, None, None
        self._disturbed = False

    def disturbed(self, now: float) -> None:
        """A pause begins or ends: the iteration in which it is says nothing."""
        self._marked, self._disturbed = now, True

    def _mark(self, now: float) -> None:
        if self._marked is not None and self.done >= FIRST_ITERATIONS:
            self.longest = max(self.longest, now - self._marked)
        self._marked = now

    def _count(self, seconds: float) -> None:
        if self.done < FIRST_ITERATIONS:
            return
        change = _SMOOTHING * (seconds - self.typical)
        self.typical = self.typical + change if self.typical else seconds
        if self._waited is not None:
            self._own.append(seconds - self._waited)


def summarise(index: int, own: Sequence[float]) -> WindowSummary | None:
    """Median and median absolute deviation; None if too few iterations counted."""
    if len(own) < LEAST_OF_WINDOW:
        return None
    middle = median(own)
    return WindowSummary(index, middle, median(abs(value - middle) for value in own))


class LastGradient:
    """Calls ``passed`` when the parameter that gets its gradient last has got it.

    For some steps all parameters have a hook (``register_post_accumulate_grad_hook`` of
    PyTorch), then only the last one.  On a device the host runs ahead of the gradients, so a
    time taken here says nothing: parameters that are not on the CPU are not followed.
    """

    def __init__(self, passed: Callable[[], None]) -> None:
        self._passed = passed
        self._hooks: dict[int, Any] = {}
        self._last = -1
        self._steps = 0

    def follow(self, parameters: Iterable[Any]) -> None:
        """Hook the parameters that get gradients; those of an earlier call stay."""
        for parameter in parameters:
            if not _gets_gradients(parameter) or id(parameter) in self._hooks:
                continue
            with suppress(RuntimeError):
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(
                    self._arrived
                )
                self._steps = 0

    def settle(self) -> None:
        """A step begins: what came last before it is known."""
        if self._last < 0 or self._steps > LEARNING_STEPS:
            return
        self._steps += 1
        if self._steps > LEARNING_STEPS:
            for key in [key for key in self._hooks if key != self._last]:
                self._hooks.pop(key).remove()

    def forget(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _arrived(self, parameter: Any) -> None:
        self._last = id(parameter)
        self._passed()


def _gets_gradients(parameter: Any) -> bool:
    known = getattr(parameter, "register_post_accumulate_grad_hook", None) is not None
    return known and parameter.is_leaf and parameter.requires_grad and parameter.is_cpu


class TrainerWatch:
    """Marks of one rank, stored where the SMP of its node reads them.

    Every method but ``pause`` costs the training thread some microseconds; none raises, and
    none does anything after ``close``.
    """

    def __init__(
        self,
        file: PulseFile | None,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        gradients: bool = True,
    ) -> None:
        """Without a file nothing is stored; ``gradients`` is whether they are followed."""
        self._file, self._clock, self._follows = file, clock, gradients
        self._pulse = Pulse(rank=rank)
        self._iterations = Iterations()
        self._gradient = LastGradient(self._last_gradient)
        self._ended = threading.Event()
        self._dumps = -1

    @classmethod
    def begin(
        cls, environment: ProcessEnvironment, rank: int, gradients: bool = True
    ) -> TrainerWatch:
        """Watch this process; where that cannot be, training continues without it."""
        try:
            file = PulseFile(pulse_path(environment.node_dir, os.getpid()))
            watch = cls(file, rank, gradients=gradients)
        except (OSError, UntrustedFileError) as error:
            log.warning("no heartbeats are written, hangs will not be found: %s", error)
            return cls(None, rank)
        watch._write_stacks_on_signal(environment)
        watch._passed(watch._clock())
        threading.Thread(target=watch._beat, name="megatron-ft-watch", daemon=True).start()
        return watch

    def follow(self, parameters: Iterable[Any]) -> None:
        """Mark the last gradient of each backward pass of these parameters."""
        if self._file is not None and self._follows:
            self._gradient.follow(parameters)

    def training(self) -> None:
        """Everything is set up: from here on silence counts."""
        self._pulse.phase = TrainerPhase.TRAINING
        self._iterations.disturbed(self._clock())
        self._passed(self._clock())

    def restored(self) -> None:
        """Note that the state was loaded just now."""
        self._passed(self._clock())

    def step(self) -> None:
        """The optimizer is about to step."""
        now = self._clock()
        self._gradient.settle()
        self._iterations.step(now)
        self._passed(now)

    def iteration_ended(self, iteration: int) -> None:
        """``iteration`` has ended."""
        now = self._clock()
        self._iterations.ended(iteration, now)
        self._pulse.iteration = iteration
        self._pulse.first = self._pulse.first or now
        self._passed(now)

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
        self._gradient.forget()
        self._pulse.phase = TrainerPhase.ENDED
        self._store()
        self._file = None
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

    def _last_gradient(self) -> None:
        now = self._clock()
        self._iterations.gradient(now)
        self._passed(now)

    def _passed(self, now: float) -> None:
        pulse, iterations = self._pulse, self._iterations
        pulse.marks, pulse.marked, pulse.done = iterations.marks, now, iterations.done
        pulse.typical, pulse.longest = iterations.typical, iterations.longest
        if iterations.window is not None:
            window = iterations.window
            pulse.window, pulse.own, pulse.spread = window.index, window.own, window.spread
        self._store()

    def _store(self) -> None:
        if self._file is not None:
            self._file.store(self._pulse)

    def _beat(self) -> None:
        file = self._file
        while file is not None and not self._ended.is_set():
            file.beat(time.monotonic())
            self._ended.wait(BEAT_SECONDS)

    def _write_stacks_on_signal(self, environment: ProcessEnvironment) -> None:
        """Install the handler: C code without locks, which works while C code holds the GIL."""
        path = stacks_path(environment.node_dir, os.getpid())
        with suppress(OSError, UntrustedFileError, RuntimeError, ValueError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._dumps = private_files.open_file(path, flags)
            faulthandler.register(DUMP_SIGNAL, file=self._dumps, all_threads=True, chain=False)
            self._pulse.dumps = True
