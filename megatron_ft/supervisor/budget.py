"""The budget of restarts: a pure decision over the failures of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ft.core.errors import RestartBudgetError
from megatron_ft.supervisor.ends import Failure

_DOUBLINGS_LIMIT = 30


@dataclass(frozen=True)
class RestartBudget:
    """Failures since the job last made progress; ``after`` gives the next value.

    Progress is a rise of ``highest_iteration``, which is committed in memory, or of
    ``highest_saved``, which the framework has saved itself (-1: none yet).  Without progress the
    job ends with a failure of the training command that has come ``same_failure_limit`` times, on
    whatever rank; with another one that has come as often on one node; and after ``total_limit``
    restarts whatever happened.  Delays are seconds.
    """

    same_failure_limit: int = 3
    total_limit: int = 20
    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 60.0
    highest_iteration: int = -1
    highest_saved: int = -1
    failures: tuple[Failure, ...] = ()
    restarts_without_progress: int = 0
    first: str = ""

    def after(self, failure: Failure, iteration: int, *, saved: int = -1) -> RestartBudget:
        """The budget once ``failure`` happened, when ``iteration`` was the highest committed.

        ``saved`` is the newest that the framework has saved itself.  Raises RestartBudgetError
        when the job is not to be started again.
        """
        now = self._noted(failure, iteration, saved)
        if failure.final:
            raise RestartBudgetError(f"{failure.text}; another start would meet the same failure")
        if now.restarts_without_progress >= self.total_limit:
            raise RestartBudgetError(now._explain(failure, now.restarts_without_progress))
        same = [one for one in now.failures if failure.is_like(one)]
        if not failure.training:
            same = [one for one in same if failure.node and one.node == failure.node]
        if len(same) >= self.same_failure_limit:
            raise RestartBudgetError(now._explain(failure, len(same)))
        return now

    def _noted(self, failure: Failure, iteration: int, saved: int) -> RestartBudget:
        # Each for itself: the folder may hold what another job has saved later than this one is.
        if iteration > self.highest_iteration or saved > self.highest_saved:
            return RestartBudget(
                self.same_failure_limit,
                self.total_limit,
                self.first_delay_seconds,
                self.longest_delay_seconds,
                max(iteration, self.highest_iteration),
                max(saved, self.highest_saved),
                failures=(failure,),
                first=failure.text,
            )
        return replace(
            self,
            failures=(*self.failures, failure),
            restarts_without_progress=self.restarts_without_progress + 1,
            first=self.first or failure.text,
        )

    def from_other_start(self) -> RestartBudget:
        """The budget of a job whose next start is from another state than its last ones.

        Earlier failures say nothing of that one.  The total stays.
        """
        return replace(self, failures=())

    @property
    def delay_seconds(self) -> float:
        """Wait before the next start: none after progress, else twice the last."""
        if self.restarts_without_progress == 0:
            return 0.0
        doublings = min(self.restarts_without_progress - 1, _DOUBLINGS_LIMIT)
        return min(self.longest_delay_seconds, self.first_delay_seconds * 2.0**doublings)

    def _explain(self, failure: Failure, count: int) -> str:
        """The failure that came ``count`` times, where training stands, and what to do."""
        newest = f"iteration {self.highest_iteration} is the newest commit"
        reached = newest if self.highest_iteration >= 0 else "nothing committed"
        before = f" (the first: {self.first})" if self.first != failure.text else ""
        place = f" on node {failure.node}" if failure.node else ""
        return (
            f"{count} failures without progress ({reached}), the last{place}: {failure.text}"
            f"{before}; "
            "see the logs, fix the cause, then run the same command, which continues from the "
            "newest snapshot"
        )
