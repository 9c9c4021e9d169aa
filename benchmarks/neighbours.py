"""What a save costs the iteration beside it: iterations with one against their neighbours without.

On a shared machine this tells more than phases of each kind, which are seconds apart: the speeds of
189 such pairs had a mean with a standard error of 0.003, those of 28 pairs of phases of four
iterations one of 0.015.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from benchmarks.table import Row

PAIRS = 28
"""In a round."""

SPEED = "x speed without saves"

NONE_TAKEN = "no snapshot was taken in the measured iterations"

Phase = list[dict[str, float]]
"""Iterations that followed one another; a save is made at the end of one, and takes its effect in
the next."""


def row(
    name: str, phase: Phase, *, control: bool = False, limit: float | None = None, note: str = ""
) -> Row:
    """Speed of iterations with a save against those next to them."""
    pairs = seconds(phase, control)
    speeds = tuple(without / saving for without, saving in pairs)
    both = fmean(without for without, _ in pairs) / fmean(saving for _, saving in pairs)
    return Row(name, speeds, SPEED, limit, note=f"{note}neighbours; all together {both:.3f}")


def seconds(phase: Phase, control: bool) -> list[tuple[float, float]]:
    """Seconds of neighbours: without a save, and with one; RuntimeError if there are none.

    They count from the end of one iteration, where a save begins, to the end of the next.  In a
    ``control`` every second one passes for one with a save.
    """
    spans = [
        (
            one["save"] + after["total"] - after["save"],
            bool(number % 2 if control else one["saved"]),
        )
        for number, (one, after) in enumerate(pairwise(phase))
    ]
    pairs, at = [], 0
    while at + 1 < len(spans):
        (first, saving), (second, too) = spans[at : at + 2]
        if saving != too:
            pairs.append((second, first) if saving else (first, second))
        at += 1 if saving == too else 2
    if not pairs:
        raise RuntimeError(NONE_TAKEN)
    return pairs
