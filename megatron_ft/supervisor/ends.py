"""Ends of training: whether a program whose ranks have all exited with 0 has finished its plan.

A program may end itself before its planned end, as links of a chain of batch jobs do.  What its
memory holds is then the start of the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m


class End(Enum):
    """The end of a training command that exited with 0 on all ranks."""

    FINISHED = "finished"
    """Its plan is done."""
    EARLY = "early"
    """The program itself says that it ended before its planned end."""
    UNKNOWN = "unknown"
    """Nobody has said what the plan is: memory stays for a while."""
    DRAINED = "drained"
    """The same, and what memory held is on disk."""

    @property
    def frees(self) -> bool:
        """True if nothing stays in memory."""
        return self in (End.FINISHED, End.DRAINED)


HOW_TO_FREE = (
    "`last=` or `close(finished=True)` in the program, or --free-on-exit, say that an end is the "
    "planned one"
)


def describe(end: End, committed: tuple[SnapshotId, int, str] | None) -> str:
    """The begin of a sentence about this end, and about the snapshot that is left."""
    why = "training has stopped itself before its planned end"
    if end is not End.EARLY:
        why = "training has ended, and nothing says if this was its planned end"
    return f"{why}: " + ("no snapshot" if committed is None else f"iteration {committed[1]}")


def judge(said: Collection[bool], *, holds: bool, frees: bool) -> End:
    """The end of a job whose ranks have ``said`` whether their plan is done.  Pure.

    ``holds`` is whether memory holds a snapshot, ``frees`` whether every end with 0 is to count as
    the planned one.
    """
    if frees:
        return End.FINISHED
    if not all(said):
        return End.EARLY
    # Without a snapshot there is nothing to keep.
    return End.FINISHED if said or not holds else End.UNKNOWN


class SaidEnds:
    """What the ranks of the present incarnation have said: a listener of its nodes' events."""

    def __init__(self) -> None:
        self._said: dict[str, m.Ending] = {}

    def begin_incarnation(self) -> None:
        """What earlier ranks said is void."""
        self._said.clear()

    def __call__(self, event: m.NodeEvent) -> None:
        """Note what a rank says."""
        if isinstance(event.body, m.Ending):
            self._said[event.body.shard_id] = event.body

    @property
    def finished(self) -> list[bool]:
        """What each rank has said."""
        return [one.finished for one in self._said.values()]
