"""The ends of an incarnation, by kind: budget, policies, evidence and events match on them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from megatron_ft.core.errors import ControlPlaneError


@dataclass(frozen=True)
class Finished:
    """All ranks have exited with 0."""


@dataclass(frozen=True)
class Asked:
    """Another incarnation is wanted, by a user or a policy: nothing has failed.

    ``idle`` as for Failure.
    """

    text: str
    idle: float = 0.0


@dataclass(frozen=True)
class Failure:
    """An unplanned end; ``text`` is for people, ``node`` is the one that is implicated, if any.

    With ``final`` another start would meet the same failure.  ``idle`` is for how many seconds
    training had made no progress when this was found, 0 if it is found at once.  ``words`` name
    the kind in events; ``training`` says that the training command itself failed: not a node, nor
    somebody who killed it.
    """

    text: str
    node: str = ""
    final: bool = False
    idle: float = 0.0
    words: ClassVar[str]
    training: ClassVar[bool] = False

    @property
    def cause(self) -> str:
        return self.words

    def is_like(self, other: Failure) -> bool:
        """True for one of the same kind, on whatever rank or node and in whatever iteration."""
        return type(self) is type(other)


class NodeLost(Failure):
    """A node is gone, or does not answer."""

    words = "a node was lost"


@dataclass(frozen=True)
class TrainerFailed(Failure):
    """A trainer ended by itself with ``status``, a signal if below zero."""

    status: int = 1
    killed: ClassVar[str] = "a trainer was killed"
    exited: ClassVar[str] = "a trainer exited"
    training = True

    @property
    def cause(self) -> str:
        killed = f"{self.killed} by signal {-self.status}"
        return killed if self.status < 0 else f"{self.exited} with {self.status}"

    def is_like(self, other: Failure) -> bool:
        return isinstance(other, TrainerFailed) and other.status == self.status


class TrainerStopped(TrainerFailed):
    """A trainer was killed from outside, or ended to be run again: the command is not at fault."""

    training = False


@dataclass(frozen=True)
class Hung(Failure):
    """Training makes no progress; ``text`` is the same for the same ranks in the same place.

    The job waits for ``ranks``.  ``report`` is the whole story for people, ``folder`` has the
    stacks, ``how`` is a key of autopsy.HOW where it is known.
    """

    ranks: tuple[int, ...] = ()
    report: str = ""
    folder: Path = Path()
    how: str = ""
    words = "a hang"
    training = True


class NotRegistered(Failure):
    """Some ranks did not register in time."""

    words = "ranks did not register"
    training = True


class ReplicasDiffer(Failure):
    """Replicas that must be equal are not; a ``node`` is at fault beyond doubt."""

    words = "replicas differ"


class TrainerRefused(Failure):
    """The scheduler did not start a trainer."""

    words = "the scheduler did not start a trainer"


class SmpLost(Failure):
    """An SMP ended, and no other one took its place."""

    words = "a snapshot daemon was not replaced"


class ArenaRemoved(Failure):
    """The file of an arena is gone."""

    words = "an arena was removed"


class NoRoom(Failure):
    """A node has too little memory for its part."""

    words = "a node has no room"


class RebuildFailed(Failure):
    """Lost shards could not be rebuilt from parity."""

    words = "a rebuild failed"


class LoadFailed(Failure):
    """A drained checkpoint could not be loaded."""

    words = "a checkpoint could not be loaded into memory"


@dataclass(frozen=True)
class Interrupted(Failure):
    """An error ended the incarnation: of the control plane, or of the coordinator itself."""

    error: type[BaseException] = ControlPlaneError

    @property
    def cause(self) -> str:
        name = self.error.__name__
        ours = issubclass(self.error, ControlPlaneError)
        return name if ours else f"the coordinator failed with {name}"

    def is_like(self, other: Failure) -> bool:
        return isinstance(other, Interrupted) and other.error is self.error


End = Finished | Asked | Failure

Found = TypeVar("Found")

CANCEL_SECONDS = 0.1
"""Interval at which detectors that do not end are cancelled again."""


async def first_end(*detectors: Coroutine[Any, Any, Found]) -> Found:
    """Return the result of the first detector to end, and cancel the others.

    Of several that have ended the first in their order counts.

    An error of a detector is raised in place of what it finds.
    """
    tasks = [asyncio.create_task(detector) for detector in detectors]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        left = {*tasks}
        while left:
            # Repeated: before Python 3.12 wait_for loses a cancel that comes with an answer.
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)
        await asyncio.gather(*tasks, return_exceptions=True)
