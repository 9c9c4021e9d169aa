"""Ends of training: whether a program whose ranks have all exited with 0 has finished its plan.

A program may end itself before its planned end, as links of a chain of batch jobs do.  What its
memory holds is then the start of the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from enum import Enum

from megatron_ft.core.errors import ControlPlaneError, MegatronFTError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.emergency_drain import EmergencyDrain
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.standing import Committed

KEEP_MINUTES = 10.0
"""Time that memory is kept where it could not be drained, and the job's settings say 0."""


class Outcome(Enum):
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
        return self in (Outcome.FINISHED, Outcome.DRAINED)


HOW_TO_FREE = (
    "`last=` or `close(finished=True)` in the program, or --free-on-exit, say that an end is the "
    "planned one"
)


def describe(end: Outcome, committed: Committed | None) -> str:
    """The begin of a sentence about this end, and about the snapshot that is left."""
    why = "training has stopped itself before its planned end"
    if end is not Outcome.EARLY:
        why = "training has ended, and nothing says if this was its planned end"
    return f"{why}: " + ("no snapshot" if committed is None else f"iteration {committed.iteration}")


def judge(said: Collection[bool], *, holds: bool, frees: bool) -> Outcome:
    """The end of a job whose ranks have ``said`` whether their plan is done.  Pure.

    ``holds`` is whether memory holds a snapshot, ``frees`` whether every end with 0 is to count as
    the planned one.
    """
    if frees:
        return Outcome.FINISHED
    if not all(said):
        return Outcome.EARLY
    # Without a snapshot there is nothing to keep.
    return Outcome.FINISHED if said or not holds else Outcome.UNKNOWN


class JobEnding:
    """Carries out the end of a job whose ranks have all exited with 0.

    ``text`` says, after ``carry_out``, why training was ended early, and what is left of it.
    """

    def __init__(self, job: JobContext, drains: Drains, emergency: EmergencyDrain) -> None:
        self.text = ""
        self._spec, self._state = job.spec, job.state
        self._fleet, self._standing = job.fleet, job.standing
        self._members, self._drains, self._emergency = job.members, drains, emergency
        self._said: dict[str, bool] = {}
        job.fleet.listen(self._note)

    def begin_incarnation(self) -> None:
        self._said.clear()

    def _note(self, event: m.NodeEvent) -> None:
        if isinstance(event.body, m.Ending):
            self._said[event.body.shard_id] = event.body.finished

    def judge(self) -> Outcome:
        """The end of this incarnation."""
        settings = self._spec.settings
        places = settings.drain_dir is not None or settings.keep_minutes > 0
        holds = self._standing.committed is not None and places
        return judge(self._said.values(), holds=holds, frees=self._spec.free_on_exit)

    async def carry_out(self, end: Outcome) -> Outcome:
        """Free the memory of a job whose plan is done; drain or keep what others continue from."""
        if end is Outcome.FINISHED:
            await self._settle()
            await self._retire("training finished; the memory is free again")
            return end
        self.text = describe(end, self._standing.committed)
        if await self._on_disk():
            self.text += " is on disk"
            end = Outcome.DRAINED if end is Outcome.UNKNOWN else end
        if end is Outcome.DRAINED:
            free = "the memory is free; the same command resumes from there"
            await self._retire(f"{self.text}, {free}; {HOW_TO_FREE}")
        elif end is Outcome.UNKNOWN:
            await self._keep()
        return end

    async def _on_disk(self) -> bool:
        """Drain the newest snapshot; False without a drain folder, or if it came to nothing."""
        standing = self._standing
        newest = standing.committed
        if newest is None or self._spec.settings.drain_dir is None:
            return False
        await self._drains.abandon()
        await self._emergency.without_trainers("training has ended")
        return standing.durable is not None and standing.durable.snapshot >= newest.snapshot

    async def _keep(self) -> None:
        """Leave memory to the SMPs, which free it in time; a start after that begins anew."""
        seconds = 60 * (self._spec.settings.keep_minutes or KEEP_MINUTES)
        self._state.update(committed=False)
        then = f"stays in memory for {seconds:g} s, in which the same command resumes from there"
        await self._retire(f"{self.text} {then}; {HOW_TO_FREE}", seconds)

    async def leave_nothing(self) -> None:
        """End the SMPs of a job that has never committed a snapshot: nothing can resume from them.

        They refuse it where another supervisor leads the job by now.
        """
        request = m.Retire(self._fleet.incarnation, remove_arenas=True)
        with suppress(MegatronFTError):
            await self._fleet.ask_all({node: request for node in self._fleet.links})
            self._state.update(smps={})

    async def _settle(self) -> None:
        """Let the last drain of a finished job end; it is given up if an SMP ends before it."""
        try:
            await self._members.while_all_answer(self._drains.settle())
        except ControlPlaneError as error:
            text = f"the last drain is given up: {error}"
            self._fleet.observers.emit("drain_failed", text)

    async def _retire(self, text: str, seconds: float = 0.0) -> None:
        """Free the memory of a job that has ended.  A node that does not answer spoils nothing."""
        fleet = self._fleet
        request = m.Retire(fleet.incarnation, remove_arenas=True, seconds=seconds)
        try:
            await fleet.ask_all({node: request for node in fleet.links})
        except MegatronFTError as error:
            fleet.observers.emit(
                "not_freed", f"memory may be left behind, `megatron-ft clean` frees it: {error}"
            )
        fleet.observers.emit("finished", text)
