"""The watch over a running job: hangs and the time of recoveries, in one loop.

A rank hangs when it makes no progress for longer than it ever did before; how long that is
is learned from silences that ended by themselves.  The rank that a stuck job waits for is decided
from marks, states and stacks, which faulthandler writes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.config import SnapshotConfig
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.heartbeat_page import TrainerPhase
from megatron_ft.smp.heartbeats import STACK_SECONDS
from megatron_ft.supervisor.autopsy import HOW, LIBRARY, LOADER, LOCKED, SUSPENDED
from megatron_ft.supervisor.ends import Hung
from megatron_ft.supervisor.events import CaughtUpEvent, RecoveredEvent
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.heartbeats import RankReport, RecoveryClock
from megatron_ft.supervisor.stragglers import Stragglers
from megatron_ft.trainer.heartbeats import BEAT_SECONDS, FIRST_ITERATIONS

log = logging.getLogger(__name__)


PAUSE_SECONDS = 3600.0
"""Time that evaluations and checkpoints may take whose begin and end are known."""

START = 0.8
"""Share of the time to register that a start may take: the job gives up with it, and knows less
of why."""

HANG_FACTOR = 5.0
"""A silence this many times as long as the longest so far is too long."""

MOST_FOLDERS = 10
"""Hangs whose stacks are kept."""

_LINE = re.compile(r":\d+\)")


def learned_timeout(longest: float, settings: SnapshotConfig) -> float:
    """Seconds of silence in mid-training from which on a rank counts as stuck.

    ``longest`` is the longest silence of any rank that ended by itself, evaluations and
    checkpoints that nobody announced among them: each has taught us its length.
    """
    return max(settings.hang_seconds, HANG_FACTOR * longest)


def allowance(phase: int, done: int, learned: float, settings: SnapshotConfig) -> float:
    """Seconds of silence that a rank may have now; endless when training is over."""
    first = settings.register_timeout_seconds
    if phase == TrainerPhase.ENDED:
        return float("inf")
    if phase == TrainerPhase.STARTING:
        return START * first
    # The first iterations of an incarnation compile.
    allowed = learned if done >= FIRST_ITERATIONS else max(learned, first)
    return max(allowed, PAUSE_SECONDS) if phase == TrainerPhase.PAUSED else allowed


class JobWatch:
    """Watches one job over all its incarnations; what it finds is an event for the observers.

    ``clock`` measures recoveries.
    """

    def __init__(self, fleet: Fleet, settings: SnapshotConfig, log_dir: Path) -> None:
        self.clock = RecoveryClock()
        self._fleet, self._settings, self._log_dir = fleet, settings, log_dir
        self._ranks, self._longest, self._failed = 0, 0.0, False
        self._behind = -1
        self._recovery: dict[str, Any] | None = None
        self._source, self._restarts = "", dict[str, float]()
        self._stragglers = Stragglers()
        self.report: dict[str, Any] = {}
        """Restarts, hangs and slow ranks, for the job's summary."""

    def begin_incarnation(self, ranks: int, decided: float, behind: int, source: str) -> None:
        """Begin to watch ``ranks`` trainers, which are about to be started.

        ``decided`` is when it was decided what they restore, ``behind`` the iteration up to which
        they repeat what was lost, -1 if nothing was; ``source`` is where they restore it from.
        """
        self._ranks, self._behind, self._source = ranks, behind, source
        self._fleet.heartbeats.begin_incarnation()
        self._stragglers = Stragglers()
        self.clock.starting(decided)

    async def until_hang(self) -> Hung:
        """Look at each heartbeat; returns when training hangs and must be restarted."""
        while True:
            await asyncio.sleep(self._fleet.timing.heartbeat)
            try:
                heard = self._fresh()
                self._poll(heard)
                if self._stuck(heard) and (hang := await self._hang()) is not None:
                    fields = {"ranks": list(hang.ranks), "folder": str(hang.folder)}
                    self._fleet.observers.emit("hang", hang.report, **fields, how=hang.how)
                    return hang
            except Exception as error:
                # A mistake of ours, or a full disk, does not end a job that trains.
                self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.exception("the watch failed")
            self._fleet.observers.emit("watch_failed", f"hangs may be missed: {error!r}")

    def _fresh(self) -> list[RankReport]:
        age = 4 * self._fleet.timing.heartbeat
        heard = self._fleet.heartbeats.fresh(self._ranks, age)
        self._longest = max([self._longest, *(one.report.longest for one in heard)])
        return heard

    def _poll(self, heard: Sequence[RankReport]) -> None:
        """Emit recoveries that have ended, and renew what status shows."""
        fleet = self._fleet
        if (done := self.clock.poll(heard)) is not None:
            starts = {kind: list(ranks) for kind, ranks in done.starts.items()}
            event = RecoveredEvent(total=round(done.total, 3), starts=starts, **done.parts())
            fleet.observers.emit(event, done.describe())
            self._recovery = {"text": done.describe(), "total": done.total, **done.parts()}
            self._recovery["restart"] = done.restart()
            self._restarts[self._source] = round(done.total, 3)
        iteration = min((one.report.iteration for one in heard), default=-1)
        if 0 <= self._behind < iteration:
            newer = (iteration - self._behind) * max(one.report.typical for one in heard)
            text = f"caught up with iteration {self._behind}"
            fleet.observers.emit(CaughtUpEvent(iteration=self._behind, ago=newer), text)
            self._behind = -1
        for slow in self._stragglers.judge(heard, time.monotonic()):
            named = {"rank": slow.rank, "node": slow.node, "iterations": slow.iterations}
            factor = round(slow.factor, 3)
            fleet.observers.emit("straggler", str(slow), **named, factor=factor)
        self.report = {
            "hang_timeout": round(learned_timeout(self._longest, self._settings), 3),
            "recovery": self._recovery,
            "restarts": self._restarts,
            "iteration_seconds": fleet.heartbeats.iteration_seconds,
            "stragglers": list(map(str, self._stragglers.present.values())),
        }

    def _stuck(self, heard: Sequence[RankReport]) -> list[float]:
        """The silences that are longer than they may be, in seconds."""
        now, settings = time.monotonic(), self._settings
        learned = learned_timeout(self._longest, settings)
        allowed = [allowance(h.report.phase, h.report.done, learned, settings) for h in heard]
        if not settings.hang_seconds:
            return []
        return [h.idle(now) for h, most in zip(heard, allowed, strict=True) if h.idle(now) > most]

    async def _hang(self) -> Hung | None:
        """The hang of this moment, if there still is one, its stacks written to disk."""
        # Asked once more: this process may have been suspended behind the last answers.
        await self._fleet.refresh()
        heard = self._fresh()
        stuck = self._stuck(heard)
        if not stuck:
            return None
        stacks = await self._stacks(sorted({one.node for one in heard}))
        folder = self._log_dir / f"hang-{self._fleet.incarnation:06d}"
        await asyncio.to_thread(_write, folder, heard, stacks)
        return self._describe(heard, max(stuck), stacks, folder)

    def _describe(
        self, heard: list[RankReport], idle: float, stacks: dict[str, str], folder: Path
    ) -> Hung:
        witnesses = [
            Witness.of(
                h.report.rank,
                h.report.marks,
                h.report.state,
                stacks.get(h.shard, ""),
                locked=is_locked(h.report.quiet, h.report.idle),
            )
            for h in heard
        ]
        ranks, reason = blame(witnesses)
        where = {str(w.place) for w in witnesses if w.rank in ranks and w.place}
        place = ", ".join(sorted(where)) or "an unknown place"
        nodes = {h.report.rank: h.node for h in heard}
        names = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks)
        # A loop is met in another line each time.
        signature = f"hang of rank {', '.join(map(str, ranks))} at {_LINE.sub(')', place)}"
        allowed = learned_timeout(self._longest, self._settings)
        how = next((w.how for w in witnesses if ranks == (w.rank,)), "")
        more = f" ({HOW[how]})" if how and how != SUSPENDED else ""
        text = (
            f"hang: no progress for {idle:.1f} s (allowed: {allowed:.1f} s); the job waits for "
            f"{names}: {reason}{more}; at {place}; stacks of all ranks: {folder}"
        )
        node = nodes[ranks[0]] if len(ranks) == 1 else ""
        return Hung(signature, node, idle=idle, ranks=ranks, report=text, folder=folder, how=how)

    async def _stacks(self, nodes: Sequence[str]) -> dict[str, str]:
        """The stacks of each shard's rank, without those of nodes that do not answer."""
        links = [link for n in nodes if (link := self._fleet.links.get(n)) is not None]
        request = m.StacksRequest(self._fleet.incarnation)
        answers = await asyncio.gather(
            *(link.ask(request, 2 * STACK_SECONDS) for link in links), return_exceptions=True
        )
        stacks: dict[str, str] = {}
        for answer in answers:
            stacks |= answer.stacks if isinstance(answer, m.Stacks) else {}
        return stacks


def _write(folder: Path, heard: Sequence[RankReport], stacks: dict[str, str]) -> None:
    """One file a rank; the oldest hangs make room."""
    older = sorted(path for path in folder.parent.glob("hang-*") if path != folder)
    for path in older[: max(0, len(older) - MOST_FOLDERS + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for one in heard:
        report = one.report
        head = (
            f"rank {report.rank} ({one.shard}) on {one.node}: iteration {report.iteration} ended, "
            f"{report.marks} marks, the last {report.idle:.1f} s before; process state "
            f"{report.state}, threads ran {report.quiet:.1f} s before\n\n"
        )
        text = stacks.get(one.shard) or "(no stacks: it did not answer the signal)\n"
        (folder / f"rank{report.rank}.txt").write_text(head + text)


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/deepspeed/comm/",
)
"""Files in which a rank waits for others; some wait in C++ called from there."""

_RESILIENT = "/megatron_ft/trainer/resilient.py"
_LOADER_FILES = ("/torch/utils/data/", "/megatron/core/datasets/", "/deepspeed/runtime/dataloader")
"""Files in which a rank reads its data, or waits for processes that do."""

_BACKWARD = "_engine_run_backward"
"""The backward pass is C++: DDP exchanges gradients in it, and Python shows only this."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def main_thread(text: str) -> list[Frame]:
    """Frames of the main thread, innermost first; none if it is not there.

    faulthandler lists the newest thread first, so the main thread comes last.
    """
    last = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)[1:][-1:]
    matches = (_FRAME.match(line) for part in last for line in part.splitlines())
    return [Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m]


def waits_for_others(frames: Sequence[Frame]) -> bool | None:
    """True if the thread is in a collective; None where the stack does not show it.

    It can be in one, or compute, in the midst of a backward pass.  After an error of a collective
    ``run_resilient`` waits for the restart that explains it.
    """
    if any(f.function == "explains" and f.file.endswith(_RESILIENT) for f in frames):
        return True
    if frames and any(part in frames[0].file for part in _COLLECTIVE_FILES):
        return True
    return None if not frames or frames[0].function == _BACKWARD else False


def loads_data(frames: Sequence[Frame]) -> bool:
    return any(part in frame.file for frame in frames for part in _LOADER_FILES)


def is_locked(quiet: float, idle: float) -> bool:
    """True if C code must hold the interpreter's lock of a process that runs.

    ``quiet`` and ``idle`` are the seconds since its watching thread ran, which needs the lock, and
    since its last mark.  A busy machine makes the thread late, but not by half of a hang.
    """
    return quiet > max(2 * BEAT_SECONDS, idle / 2)


def of_training(frames: Sequence[Frame]) -> list[Frame]:
    """The frames outside of libraries; all if there are none."""
    return [frame for frame in frames if not LIBRARY.search(frame.file)] or list(frames)


_STOPPED = frozenset("Tt")
"""The kernel's letters for a process that was stopped by a signal or a debugger (proc(5))."""


@dataclass(frozen=True)
class Witness:
    """The evidence of one rank of a stuck job.

    ``marks`` are those since its incarnation began, ``state`` is the kernel's of its process;
    ``place`` is where its main thread is, None if not known, and ``waits`` is whether that is in a
    collective, None if the stack cannot tell.  ``loads`` is whether it is in a data loader,
    ``locked`` as of ``is_locked``.
    """

    rank: int
    marks: int
    state: str
    place: Frame | None = None
    waits: bool | None = None
    loads: bool = False
    locked: bool = False

    @classmethod
    def of(cls, rank: int, marks: int, state: str, stacks: str, *, locked: bool = False) -> Witness:
        """The evidence of one rank, completed by what its stacks tell."""
        frames = main_thread(stacks)
        place = of_training(frames)[0] if frames else None
        waits, loads = waits_for_others(frames), loads_data(frames)
        # A frozen process writes no stacks.
        return cls(rank, marks, state, place, waits, loads, locked and bool(frames))

    @property
    def how(self) -> str:
        """The way in which it hangs, if known: a key of HOW in autopsy.py; else empty."""
        if self.state in _STOPPED:
            return SUSPENDED
        if self.locked:
            return LOCKED
        return LOADER if self.loads and self.waits is False else ""

    @property
    def function(self) -> str:
        return "" if self.place is None else self.place.function


def blame(witnesses: Sequence[Witness]) -> tuple[tuple[int, ...], str]:
    """The stuck ranks among all, and how that is known; all if nothing tells them apart.

    In order of certainty: a process that is suspended; ranks that passed the fewest marks;
    among those, ranks whose main thread is not in a collective; ranks whose interpreter C code
    has locked; ranks that are elsewhere than most.
    """
    assert witnesses
    suspended = [w for w in witnesses if w.how == SUSPENDED]
    if suspended:
        return _blame(suspended, "its process is suspended (SIGSTOP or a debugger)")
    fewest = min(w.marks for w in witnesses)
    behind = [w for w in witnesses if w.marks == fewest]
    if len(behind) == 1:
        return _blame(behind, "it is behind all others")
    working = [w for w in behind if w.waits is False]
    if working and len(working) < len(behind):
        return _blame(working, "it is in no collective")
    locked = [w for w in behind if w.locked]
    if locked and len(locked) < len(behind):
        return _blame(locked, "no thread of Python runs in it")
    usual, count = Counter(w.function for w in witnesses).most_common(1)[0]
    apart = [w for w in behind if w.function != usual]
    if apart and 2 * count > len(witnesses):
        return _blame(apart, "it is elsewhere than the others")
    return _blame(behind, "nothing else tells the ranks apart")


def _blame(ranks: Sequence[Witness], reason: str) -> tuple[tuple[int, ...], str]:
    return tuple(sorted(w.rank for w in ranks)), reason
