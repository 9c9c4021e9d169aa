"""The trainer's part of the watch: it passes marks, a thread beats, a signal writes stacks.

When the last gradient of a backward pass is there: the end of a rank's own part of it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_ft.core import private_files
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import UntrustedFileError
from megatron_ft.rpc.heartbeat_page import (
    DUMP_SIGNAL,
    Phase,
    Pulse,
    PulseFile,
    pulse_path,
    stacks_path,
)
from megatron_ft.trainer.watch.iterations import Iterations
from megatron_ft.trainer.watch.start_parts import StartParts

LEARNING_STEPS = 2
"""Which parameter is last does not change; DDP orders its buckets anew after the first step."""


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


log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0

_IMPORTED = time.monotonic()
"""The snapshot manager needs this module, and a script imports that behind its framework."""


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
        self._start = StartParts(self._pulse, _IMPORTED)
        self._gradient = LastGradient(self._last_gradient)
        self._ended = threading.Event()
        self._dumps = -1

    @classmethod
    def begin(
        cls, environment: ProcessEnvironment, rank: int, gradients: bool = True
    ) -> TrainerWatch:
        """Watch this process; where that cannot be, training goes on without it."""
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
        self._pulse.phase = Phase.TRAINING
        self._iterations.disturbed(self._clock())
        self._passed(self._clock())

    def restored(self, seconds: float) -> None:
        """The state was loaded, just now, in so many seconds."""
        self._start.restored(seconds)
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
        if not self._iterations.done:
            self._start.first_ended()
        self._iterations.ended(iteration, now)
        self._pulse.iteration = iteration
        self._passed(now)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around an evaluation or a checkpoint: no iteration ends meanwhile, which is right."""
        before = self._pulse.phase
        self._enter(Phase.PAUSED if before == Phase.TRAINING else Phase(before))
        try:
            yield
        finally:
            if self._pulse.phase != Phase.ENDED:
                self._enter(Phase(before))

    def close(self) -> None:
        """Training is over: silence says nothing any more."""
        self._ended.set()
        self._gradient.forget()
        self._pulse.phase = Phase.ENDED
        self._store()
        self._file = None
        if self._dumps >= 0:
            faulthandler.unregister(DUMP_SIGNAL)
            # Whoever sends it late must not end this process.
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
            os.close(self._dumps)
            self._dumps = -1

    def _enter(self, phase: Phase) -> None:
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
        """The handler is C code and takes no lock: it works while C code holds the interpreter."""
        path = stacks_path(environment.node_dir, os.getpid())
        with suppress(OSError, UntrustedFileError, RuntimeError, ValueError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._dumps = private_files.open_file(path, flags)
            faulthandler.register(DUMP_SIGNAL, file=self._dumps, all_threads=True, chain=False)
            self._pulse.dumps = True
