"""Failures of a job: their kinds, kills for want of memory, and the budget of restarts.

The budget is a pure decision.  A process that the OOM killer ends looks like any other that is
ended by signal 9, so the memory cgroups of this machine are read as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ft.arena.limits import CGROUP_ROOT, PROC, cgroup_folders
from megatron_ft.core.errors import RestartBudgetError
from megatron_ft.supervisor.events import JobEvent, Observers

_DOUBLINGS_LIMIT = 30
OTHER_STARTS = 3

RERUN_CODES = (16, 17)
"""Exit codes of Megatron's rerun machine for a doubtful result; the snapshot is not at fault."""

NODE_LOST = "a node was lost"
"""The cause of failures that a node's loss has led to."""


@dataclass(frozen=True)
class Failure:
    """End of an incarnation.

    ``text`` is for people.  ``cause`` names the class of the failure: the same words on
    whatever rank or node and in whatever iteration it happens.  ``place`` is the node that is
    implicated, empty if none is.  ``training`` says that the training command itself failed:
    not a node, nor somebody who killed it.  ``asked`` that the user wanted the incarnation to
    end, ``final`` that another start would meet the same failure.
    """

    text: str
    cause: str = ""
    place: str = ""
    training: bool = False
    asked: bool = False
    final: bool = False


@dataclass(frozen=True)
class RestartBudget:
    """Failures since the job last made progress; ``after`` gives the next value.

    Progress is a rise of ``highest_iteration``, which is committed in memory, or of
    ``highest_saved``, which the framework has saved itself (-1: none yet).  Without progress the
    job ends with a failure of the training command that has come ``same_failure_limit`` times, on
    whatever rank; with another one that has come so often on one node, or ``elsewhere_limit`` times
    anywhere; and after ``total_limit`` restarts whatever happened.  So no sequence of failures
    without progress leads to more than ``total_limit`` starts, however many ranks there are.

    Before a repeated failure ends the job, the one node on which it was seen each time is to be
    replaced: it is ``suspect`` then.  That is done once for each cause.  Delays are seconds.
    """

    same_failure_limit: int = 3
    elsewhere_limit: int = 8
    total_limit: int = 20
    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 60.0
    highest_iteration: int = -1
    highest_saved: int = -1
    failures: tuple[Failure, ...] = ()
    restarts_without_progress: int = 0
    other_starts: int = 0
    first: str = ""
    suspect: str = ""
    suspected: frozenset[str] = frozenset()

    def after(
        self, failure: Failure, iteration: int, *, saved: int = -1, spare: bool = False
    ) -> RestartBudget:
        """The budget once ``failure`` happened, when ``iteration`` was the highest committed.

        ``saved`` is the newest that the framework has saved itself, ``spare`` says that a node is
        free to replace a suspect.  Raises RestartBudgetError when the job is not to be started
        again.
        """
        now = self._noted(failure, iteration, saved)
        if failure.final:
            raise RestartBudgetError(f"{failure.text}; another start would meet the same failure")
        if now.restarts_without_progress >= self.total_limit:
            raise RestartBudgetError(now._explain_total(failure))
        same = [one for one in now.failures if one.cause == failure.cause]
        here = [one for one in same if failure.place and one.place == failure.place]
        limit = self.same_failure_limit if failure.training else self.elsewhere_limit
        if len(same) < limit and len(here) < self.same_failure_limit:
            return now
        known = failure.place and len(here) == len(same)
        if known and spare and failure.cause not in now.suspected:
            return replace(now, suspect=failure.place, suspected=now.suspected | {failure.cause})
        raise RestartBudgetError(now._explain(same))

    def _noted(self, failure: Failure, iteration: int, saved: int) -> RestartBudget:
        # Each for itself: the folder may hold what another job has saved later than this one is.
        if iteration > self.highest_iteration or saved > self.highest_saved:
            return replace(
                self,
                highest_iteration=max(iteration, self.highest_iteration),
                highest_saved=max(saved, self.highest_saved),
                failures=(failure,),
                restarts_without_progress=0,
                other_starts=0,
                first=failure.text,
                suspect="",
                suspected=frozenset(),
            )
        return replace(
            self,
            failures=(*self.failures, failure),
            restarts_without_progress=self.restarts_without_progress + 1,
            first=self.first or failure.text,
            suspect="",
        )

    def answered(self, nodes: Collection[str]) -> RestartBudget:
        """The budget of a job that has continued without these nodes.

        What happened there counts no more as an equal failure.  The total stays.
        """
        left = tuple(one for one in self.failures if one.place not in nodes)
        return replace(self, failures=left, suspect="" if self.suspect in nodes else self.suspect)

    def from_other_start(self) -> RestartBudget:
        """The budget of a job whose next start is from another state than its last ones.

        Earlier failures say nothing of that one.  At most OTHER_STARTS times without
        progress; then this budget, unchanged.  The total stays.
        """
        if self.other_starts >= OTHER_STARTS:
            return self
        return replace(self, failures=(), other_starts=self.other_starts + 1)

    @property
    def delay_seconds(self) -> float:
        """Wait before the next start: none after progress, else twice the last."""
        if self.restarts_without_progress == 0:
            return 0.0
        doublings = min(self.restarts_without_progress - 1, _DOUBLINGS_LIMIT)
        return min(self.longest_delay_seconds, self.first_delay_seconds * 2.0**doublings)

    def _explain(self, same: list[Failure]) -> str:
        others = f" (before it: {self.first})" if self.first != same[0].text else ""
        return (
            f"the same failure {len(same)} times without progress ({self._reached}): "
            f"{same[0].text}{others}; another start would meet it again: see the logs, fix the "
            "cause, then run the same command, which continues from the newest snapshot"
        )

    def _explain_total(self, failure: Failure) -> str:
        return (
            f"{self.restarts_without_progress} failures without progress ({self._reached}); the "
            f"first: {self.first}; the last: {failure.text}; see the logs, fix the cause, then "
            "run the same command, which continues from the newest snapshot"
        )

    @property
    def _reached(self) -> str:
        saved = f", iteration {self.highest_saved} is saved" if self.highest_saved >= 0 else ""
        if self.highest_iteration < 0:
            return f"nothing committed{saved}"
        return f"iteration {self.highest_iteration} is the newest commit{saved}"


_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of cgroup version 2, where a group counts those below it too, and of version 1."""


class OomKills:
    """Counts of the memory cgroup of this process and of those above it, since the last poll.

    Groups of other machines, and of processes outside of these groups, are not seen.
    """

    def __init__(self, cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = cgroup_root, proc
        self._seen = self._read()

    def poll(self) -> str:
        """The group in which most processes were killed since the last poll, "" if there is none.

        For the end of a sentence that tells of a death by signal 9.
        """
        now = self._read()
        risen = {group: count - self._seen.get(group, 0) for group, count in now.items()}
        self._seen = now
        count, group = max(((n, str(g)) for g, n in risen.items()), default=(0, ""))
        if count <= 0:
            return ""
        return (
            f"; the kernel has just killed {count} processes of memory cgroup {group} for want of "
            "memory: raise its limit, or use fewer slots or less parity"
        )

    def report_to(self, observers: Observers) -> None:
        """Emit the kills behind SMPs and encoders that die alone."""

        def on_event(event: JobEvent) -> None:
            if event.kind in ("smp_restarted", "world_ended") and (why := self.poll()):
                observers.emit("oom", why.removeprefix("; "))

        observers.add(on_event)

    def _read(self) -> dict[Path, int]:
        try:
            membership = (self._proc / "self" / "cgroup").read_text()
        except OSError:
            return {}
        counts = {}
        for folder, _ in cgroup_folders(self._root, membership):
            for name in _COUNTERS:
                count = _oom_kill(folder / name)
                if count is not None:
                    counts[folder] = count
        return counts


def _oom_kill(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(values[0]) if values and values[0].isdecimal() else None
