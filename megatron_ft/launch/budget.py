"""How often a failing job may be started again: a pure decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.errors import RestartBudgetError

_DOUBLINGS_LIMIT = 30
OTHER_STARTS = 3


@dataclass(frozen=True)
class RestartBudget:
    """Failures since the job last made progress; ``after`` gives the next value.

    Progress is a rise of the highest committed iteration (-1: none yet).  The same
    failure ``same_failure_limit`` times at one height ends the job; others may come
    between.  Delays are seconds.
    """

    same_failure_limit: int = 3
    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 60.0
    highest_iteration: int = -1
    failures: Mapping[str, int] = field(default_factory=dict)
    restarts_without_progress: int = 0
    other_starts: int = 0

    def after(self, failure: str, committed_iteration: int) -> RestartBudget:
        """The budget once ``failure`` (a text that is the same for the same cause) happened.

        Raises RestartBudgetError when it happened too often.
        """
        progressed = committed_iteration > self.highest_iteration
        before = {} if progressed else self.failures
        count = before.get(failure, 0) + 1
        highest = max(self.highest_iteration, committed_iteration)
        if count >= self.same_failure_limit:
            raise RestartBudgetError(_explain(failure, count, highest))
        return RestartBudget(
            same_failure_limit=self.same_failure_limit,
            first_delay_seconds=self.first_delay_seconds,
            longest_delay_seconds=self.longest_delay_seconds,
            highest_iteration=highest,
            failures={**before, failure: count},
            restarts_without_progress=0 if progressed else self.restarts_without_progress + 1,
            other_starts=0 if progressed else self.other_starts,
        )

    def from_other_start(self) -> RestartBudget:
        """The budget of a job whose next start is from another state than its last ones.

        Earlier failures say nothing of that one.  At most OTHER_STARTS times without
        progress; then this budget, unchanged.
        """
        if self.other_starts >= OTHER_STARTS:
            return self
        return replace(self, failures={}, other_starts=self.other_starts + 1)

    @property
    def delay_seconds(self) -> float:
        """How long to wait before the next start: none after progress, else twice the last."""
        if self.restarts_without_progress == 0:
            return 0.0
        doublings = min(self.restarts_without_progress - 1, _DOUBLINGS_LIMIT)
        return min(self.longest_delay_seconds, self.first_delay_seconds * 2.0**doublings)


def _explain(failure: str, count: int, highest: int) -> str:
    reached = f"iteration {highest} is the newest commit" if highest >= 0 else "nothing committed"
    return (
        f"the same failure {count} times without progress ({reached}): {failure}; "
        "another start would meet it again: see that rank's log, fix the cause, then run the "
        "same command, which goes on from the newest snapshot"
    )
