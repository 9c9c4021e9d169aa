"""How long a trainer may be silent before that is a hang, learned from what it did.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ft.rpc.pulse import Phase
from megatron_ft.trainer.watch.iterations import FIRST_ITERATIONS

START = 0.8
"""Share of ``first`` that a start may take: the job gives up with it, and says less of why."""


@dataclass(frozen=True)
class HangSettings:
    """``floor`` is the least timeout in seconds, 0 for no hang detection at all.

    ``factor`` is how many times as long as the longest silence so far is too long.  ``first``
    holds for the first iterations of a life, which compile, and for most of a start; ``pause``
    for evaluations and checkpoints whose begin and end are known.
    """

    floor: float = 600.0
    factor: float = 5.0
    first: float = 600.0
    pause: float = 3600.0


def learned_timeout(longest: Iterable[float], settings: HangSettings) -> float:
    """Seconds of silence in mid-training from which on a rank counts as stuck.

    ``longest`` are the longest silences of all ranks that ended by themselves, evaluations and
    checkpoints that nobody announced among them: each has taught us its length.
    """
    return max(settings.floor, settings.factor * max(longest, default=0.0))


def allowance(phase: int, done: int, learned: float, settings: HangSettings) -> float:
    """Seconds of silence that a rank may have now; endless when training is over."""
    if phase == Phase.ENDED:
        return float("inf")
    if phase == Phase.STARTING:
        return START * settings.first
    allowed = learned if done >= FIRST_ITERATIONS else max(learned, settings.first)
    return max(allowed, settings.pause) if phase == Phase.PAUSED else allowed
