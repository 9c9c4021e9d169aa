"""Rings when the loss of one node, or of a trainer, would cost more than a limit.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_ft.supervisor.exposure import redone

USUAL_INTERVALS = 4
"""Without a limit of the user's, snapshots that are this many intervals old are late.

A job in order stays below two: one interval, and the time until the next snapshot is committed.
"""
LEAST_SECONDS = 15.0
"""Without a limit of the user's, shorter outages are not worth waking anybody."""


def iteration_seconds(status: Mapping[str, Any]) -> float:
    """The usual time of an iteration, 0 while it is unknown."""
    return float(status["watch"].get("iteration_seconds") or 0.0)


def lost_iterations(status: Mapping[str, Any]) -> dict[str, int]:
    """Iterations that the loss of a trainer, a usual node and the worst node would cost now.

    Empty while nothing trains.  Checkpoints on disk count, as in ``megatron-ft status``.
    """
    if "any_node" not in status:
        return {}
    durable = -1 if status["durable"] is None else status["durable"]["iteration"]
    crash = durable if status["crash"] is None else status["crash"]
    usual = status["any_node"]["iteration"]
    worst = min([usual, *(one["iteration"] for one in status["some_nodes"])])
    falls = {"trainer": crash, "node": usual, "worst_node": worst}
    return {loss: redone(status["iteration"], reached) for loss, reached in falls.items()}


class Ring(NamedTuple):
    """A crossing of the limit; ``kind`` is "exposed" or "protected_again"."""

    kind: str
    text: str
    iterations: int
    seconds: float


class ExposureAlarm:
    """Compares what a loss would cost with the limit, and reports each crossing once.

    ``limit`` is in iterations; 0 means four intervals, and 15 s at least.  ``parity`` says whether
    the job protects itself from the loss of a node; if not, that of a trainer is judged.
    """

    def __init__(self, limit: int, *, parity: bool) -> None:
        self._limit, self._loss = limit, "worst_node" if parity else "trainer"
        self._since: float | None = None

    @property
    def rings(self) -> bool:
        """True while a loss would cost more than the limit."""
        return self._since is not None

    def poll(self, now: float, status: Mapping[str, Any]) -> Ring | None:
        """A crossing of the limit, if the job's status shows one.  ``now`` is in seconds."""
        lost = lost_iterations(status)
        if status["iteration"] < 0 or not lost:
            return None  # the next start reports what it has lost
        iterations = lost[self._loss]
        seconds = iterations * iteration_seconds(status)
        if self._limit:
            late = iterations > self._limit
        else:
            late = iterations > USUAL_INTERVALS * status["interval"] and seconds > LEAST_SECONDS
        if late == self.rings:
            return None
        loss = "a node" if self._loss == "worst_node" else "a trainer"
        text = f"the loss of {loss} would cost {iterations} iterations ({seconds:.0f} s)"
        if self._since is None:
            self._since = now
            return Ring("exposed", f"{text}: {_reason(status)}", iterations, seconds)
        lasted, self._since = now - self._since, None
        text += f": the limit was passed for {lasted:.0f} s"
        return Ring("protected_again", text, iterations, seconds)


def _reason(status: Mapping[str, Any]) -> str:
    """Reason why newer snapshots do not protect the job, as far as its status says."""
    if status["paused"]:
        return "snapshots are paused; run megatron-ft resume"
    if status["skipping_for"]:
        return f"new snapshots are skipped: {status['skipping_for']}"
    if status["given_up"] > 1:
        return f"{status['given_up']} snapshots in a row were given up: {status['given_up_reason']}"
    if status["encoders"] != "up":
        return "no encoder is running, so new snapshots get no parity"
    return "no newer snapshot was committed"
