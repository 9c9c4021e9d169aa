"""When the next snapshot is due.  Pure arithmetic on iterations."""

from __future__ import annotations


class Schedule:
    """Chooses the iteration of each snapshot, and learns how far ahead to permit it.

    Snapshots are of multiples of ``interval``; if it is not ``fixed``, of so many iterations after
    the last.  It may be changed at any time.  ``first`` is the iteration that training starts
    from, 0 or the restored one.

    ``lead`` is how many iterations ahead of the fastest known trainer a permit is given; it grows
    when a permit came too late and shrinks again after ``CALM`` commits in a row.  Where every
    iteration is wanted it may be 0: the permit is then for the iteration under way, which is in
    time where iterations are longer than its journey.
    """

    MOST_LEAD = 64
    CALM = 16

    def __init__(self, interval: int, first: int = 0, *, fixed: bool = True) -> None:
        self.interval, self.fixed, self.first = interval, fixed, first
        self.lead = self._least_lead()
        self._before = self._spent = self._reached = first
        self._refused = -1
        self._commits_in_a_row = 0

    def next_iteration(self, progress: int) -> int:
        """When the next snapshot is due; it lies more than ``lead`` ahead of ``progress``.

        That is the highest iteration that any trainer has finished, -1 if none has yet.
        """
        soonest = (self.first if progress < 0 else progress) + self.lead + 1
        if not self.fixed:
            return max(soonest, self._spent + self.interval)
        return -(-soonest // self.interval) * self.interval

    def reached(self, progress: int) -> None:
        """Training has come to ``progress``, as for ``next_iteration``.

        It may have gone back, when a script loads an older checkpoint in the middle of it: then
        snapshots of later iterations delay no other any more.
        """
        if 0 <= progress < self._reached:
            self._before = self._spent = self._refused = progress
        self._reached = max(progress, 0)

    def permitted(self, iteration: int) -> None:
        """A snapshot of ``iteration`` is permitted: the next one counts from there."""
        self._before, self._spent = self._spent, iteration

    def refused(self) -> None:
        """A node cannot take snapshots for now: wait until the iteration of this one is reached."""
        self._refused = self._spent

    def waits(self, progress: int) -> bool:
        """True until training reaches the iteration of a refused permit."""
        return progress < self._refused

    def missed(self) -> None:
        """The permit came too late for some rank.

        Tried again soon: a snapshot that some rank has missed costs the others little.
        """
        self.lead = min(self.lead + 1, self.MOST_LEAD)
        self._commits_in_a_row = 0
        self._spent = self._before

    def committed(self) -> None:
        """The snapshot was in time for every rank."""
        self._commits_in_a_row += 1
        if self._commits_in_a_row % self.CALM == 0:
            self.lead = max(self._least_lead(), self.lead - 1)

    def _least_lead(self) -> int:
        return 0 if self.interval == 1 else 1
