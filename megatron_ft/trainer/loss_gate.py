"""The loss gate: is a loss good enough for the state behind it to become the last good one?"""

from __future__ import annotations

import math
import statistics
from collections import deque

from megatron_ft.core.identity import SnapshotId

HISTORY = 64
LEAST_HISTORY = 8


class LossGate:
    """Judges one rank's losses in the order of iterations.

    A loss that is not finite never passes.  One above ``factor`` times the median of the
    last HISTORY losses does not pass either; for that LEAST_HISTORY of them must be known
    and their median be positive.  A level that stays becomes the median, so the gate
    opens again by itself.  ``factor`` 0 lets everything pass.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._history: deque[float] = deque(maxlen=HISTORY)

    @property
    def closed_for_some(self) -> bool:
        """Whether there is a gate at all."""
        return self._factor > 0

    def judge(self, loss: float) -> str:
        """Why a loss does not pass, or nothing.  It counts for the median if it is finite."""
        if not self.closed_for_some:
            return ""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        known = len(self._history) >= LEAST_HISTORY
        median = statistics.median(self._history) if known else 0.0
        self._history.append(loss)
        if median > 0 and loss > self._factor * median:
            return f"the loss {loss:.6g} is above {self._factor:g} times its median {median:.6g}"
        return ""


class Verdicts:
    """Which snapshot of one rank waits for which loss.

    The loss of an iteration is computed from the state at the end of the one before, so a
    snapshot is judged by the next loss.  One at a time: the next is permitted only
    after the last is decided.
    """

    def __init__(self, factor: float) -> None:
        self.problem = ""
        """Why the state of the present iteration must not be captured, or nothing."""
        self._gate = LossGate(factor)
        self._reports = False
        self._waiting: tuple[SnapshotId, int] | None = None
        self._judged_later: SnapshotId | None = None

    def report(self, loss: float) -> list[tuple[SnapshotId, str]]:
        """A new loss: the snapshot that it decides, with the problem or nothing."""
        if not self._gate.closed_for_some:
            return []
        self._reports, self.problem = True, self._gate.judge(loss)
        return [(snapshot, self.problem) for snapshot in self.end()]

    def captured(self, snapshot: SnapshotId, iteration: int) -> None:
        """A capture begins: if this rank reports losses, the next one decides."""
        if self._reports:
            self._waiting, self._judged_later = (snapshot, iteration), snapshot

    def waits(self, snapshot: SnapshotId) -> bool:
        """Whether a verdict on a captured snapshot was or will be given."""
        return snapshot == self._judged_later

    def overdue(self, iteration: int) -> list[SnapshotId]:
        """Snapshots after which a whole iteration has ended without a loss: they pass."""
        late = self._waiting is not None and iteration > self._waiting[1]
        return self.end() if late else []

    def end(self) -> list[SnapshotId]:
        """No loss will follow: snapshots that still wait for one."""
        waiting, self._waiting = self._waiting, None
        return [] if waiting is None else [waiting[0]]
