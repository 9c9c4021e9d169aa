"""The loss gate: is the last loss good enough for the state that it led to to be captured?"""

from __future__ import annotations

import math
import statistics
from collections import deque

HISTORY = 64
LEAST_HISTORY = 8


class LossGate:
    """Judges one rank's losses in the order of iterations, before anything is captured.

    A loss that is not finite never passes.  One above ``factor`` times the median of the
    last HISTORY losses does not pass either; for that LEAST_HISTORY of them must be known
    and their median be positive.  A level that stays becomes the median, so the gate
    opens again by itself.  ``factor`` 0 lets everything pass.

    ``problem`` says why the state of the present iteration must not be captured, if it must not.
    The gate sees the loss of the iteration that led to this state.  A state that only the last
    update made wrong shows in the next loss, when it may have been captured.
    """

    def __init__(self, factor: float) -> None:
        self.problem = ""
        self._factor = factor
        self._history: deque[float] = deque(maxlen=HISTORY)

    def report(self, loss: float) -> None:
        """Take the loss of the iteration that is about to end."""
        self.problem = self._judge(loss) if self._factor > 0 else ""

    def _judge(self, loss: float) -> str:
        """Why a loss does not pass, or nothing.  It counts for the median if it is finite."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        known = len(self._history) >= LEAST_HISTORY
        median = statistics.median(self._history) if known else 0.0
        self._history.append(loss)
        if median > 0 and loss > self._factor * median:
            return f"the loss {loss:.6g} is above {self._factor:g} times its median {median:.6g}"
        return ""
