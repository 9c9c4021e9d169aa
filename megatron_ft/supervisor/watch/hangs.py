"""Looking for hangs in a running job: who is stuck, their stacks, and what is said of it.

How long a trainer may be silent before that is a hang, learned from what it did.  Pure.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.heartbeat_page import TrainerPhase
from megatron_ft.smp.heartbeats import STACK_SECONDS
from megatron_ft.supervisor.watch.board import Heard
from megatron_ft.supervisor.watch.hang_attribution import Blame, Witness, blame
from megatron_ft.trainer.heartbeats import FIRST_ITERATIONS

if TYPE_CHECKING:
    from megatron_ft.supervisor.coordinator import Coordinator


START = 0.8
"""Share of ``first`` that a start may take: the job gives up with it, and says less of why."""


@dataclass(frozen=True)
class HangSettings:
    """``floor`` is the least timeout in seconds, 0 for no hang detection at all.

    ``factor`` is how many times as long as the longest silence so far is too long.  ``first``
    holds for the first iterations of an incarnation, which compile, and for most of a start;
    ``pause`` for evaluations and checkpoints whose begin and end are known.
    """

    floor: float = 600.0
    factor: float = 5.0
    first: float = 600.0
    pause: float = 3600.0


def learned_timeout(longest: Iterable[float], settings: HangSettings) -> float:
    """Seconds of silence in mid-training from which on a rank counts as stuck.

    ``longest`` are the longest silences of all ranks that ended by themselves, evaluations and
    checkpoints that nobody announced among them: each has taught us its length.
    """
    return max(settings.floor, settings.factor * max(longest, default=0.0))


def allowance(phase: int, done: int, learned: float, settings: HangSettings) -> float:
    """Seconds of silence that a rank may have now; endless when training is over."""
    if phase == TrainerPhase.ENDED:
        return float("inf")
    if phase == TrainerPhase.STARTING:
        return START * settings.first
    allowed = learned if done >= FIRST_ITERATIONS else max(learned, settings.first)
    return max(allowed, settings.pause) if phase == TrainerPhase.PAUSED else allowed


_LINE = re.compile(r":\d+\)")
"""A loop is met in another line each time."""

MOST_FOLDERS = 10
"""Hangs whose stacks are kept."""


@dataclass(frozen=True)
class Hang:
    """A stuck job: whom it waits for, where, and how long nobody had made progress.

    ``signature`` is the same text for a hang of the same rank in the same place, ``node`` that
    of the rank if it is a single one.
    """

    blame: Blame
    idle: float
    signature: str
    text: str
    folder: Path
    node: str = ""


class HangFinder:
    """Knows what silences are usual, over all incarnations of a job."""

    def __init__(self, coordinator: Coordinator, settings: HangSettings, log_dir: Path) -> None:
        self._coordinator = coordinator
        self._settings, self._log_dir = settings, log_dir
        self._longest = 0.0

    @property
    def timeout(self) -> float:
        """The learned timeout in seconds."""
        return learned_timeout([self._longest], self._settings)

    async def look(self, ranks: int, *, resume: bool) -> Hang | None:
        """The hang of this moment of a job of so many ranks, its stacks written to disk.

        See StacksRequest for ``resume``.
        """
        if not self._settings.floor or not self._stuck(self._fresh(ranks)):
            return None
        # Asked once more: this process may have been suspended behind the last answers.
        await self._coordinator.refresh()
        heard = self._fresh(ranks)
        stuck = self._stuck(heard)
        return await self._examine(heard, stuck, resume) if stuck else None

    def _fresh(self, ranks: int) -> list[Heard]:
        age = 4 * self._coordinator.timing.heartbeat
        heard = self._coordinator.pulses.fresh(ranks, age)
        self._longest = max([self._longest, *(one.report.longest for one in heard)])
        return heard

    def _stuck(self, heard: Sequence[Heard]) -> list[Heard]:
        now, learned = time.monotonic(), self.timeout
        return [
            one
            for one in heard
            if one.idle(now) > allowance(one.report.phase, one.report.done, learned, self._settings)
        ]

    async def _examine(self, heard: list[Heard], stuck: list[Heard], resume: bool) -> Hang:
        stacks = await self._stacks(sorted({one.node for one in heard}), resume)
        witnesses = [
            Witness.of(h.report.rank, h.report.marks, h.report.state, stacks.get(h.shard, ""))
            for h in heard
        ]
        found = blame(witnesses)
        folder = self._folder()
        await asyncio.to_thread(_write, folder, heard, stacks)
        idle = max(one.idle(time.monotonic()) for one in stuck)
        where = {w.place for w in witnesses if w.rank in found.ranks and w.place}
        place = ", ".join(sorted(where)) or "an unknown place"
        nodes = {h.report.rank: h.node for h in heard}
        names = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in found.ranks)
        text = (
            f"hang: no progress for {idle:.1f} s (allowed: {self.timeout:.1f} s); the job waits "
            f"for {names}: {found.reason}; at {place}; stacks of all ranks: {folder}"
        )
        ranks = ", ".join(map(str, found.ranks))
        signature = f"hang of rank {ranks} at {_LINE.sub(')', place)}"
        node = nodes[found.ranks[0]] if len(found.ranks) == 1 else ""
        return Hang(found, idle, signature, text, folder, node)

    async def _stacks(self, nodes: Sequence[str], resume: bool) -> dict[str, str]:
        links = [link for n in nodes if (link := self._coordinator.links.get(n)) is not None]
        request = m.StacksRequest(self._coordinator.incarnation, resume)
        answers = await asyncio.gather(
            *(link.ask(request, 2 * STACK_SECONDS) for link in links), return_exceptions=True
        )
        stacks: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, m.Stacks):
                stacks |= answer.stacks
            elif isinstance(answer, BaseException) and not isinstance(answer, ControlPlaneError):
                raise answer
        return stacks

    def _folder(self) -> Path:
        return self._log_dir / f"hang-{self._coordinator.incarnation:06d}"


def _write(folder: Path, heard: Sequence[Heard], stacks: dict[str, str]) -> None:
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
