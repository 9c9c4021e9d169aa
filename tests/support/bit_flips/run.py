"""Many trials, and their table."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.core.scheme import Scheme
from tests.support.bit_flips.stripe import Stripe
from tests.support.bit_flips.trials import Count, Trials

COMPARE_EVERY = 2000


def flip(scheme: str, flips: int, seed: int, folder: Path | None = None) -> dict[str, Count]:
    """At least ``flips`` flips on one stripe; counts by region.

    Every COMPARE_EVERY trials all bytes of all arenas are compared with what they were:
    AssertionError if anything else was written.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="megatron-ft-flips-") as place:
        stripe = Stripe(Path(place), Scheme.parse(scheme), seed)
        trials, done, number = Trials(stripe, random.Random(seed)), 0, 0
        try:
            while done < flips:
                done += trials.one()
                number += 1
                if number % COMPARE_EVERY == 0 or done >= flips:
                    assert not trials.differing(), f"wrong bytes after {done} flips, seed {seed}"
        finally:
            stripe.close()
    return trials.counts


def merge(parts: list[dict[str, Count]]) -> dict[str, Count]:
    """Counts of several processes together."""
    total: dict[str, Count] = {}
    for part in parts:
        for region, count in part.items():
            total.setdefault(region, Count()).add(count)
    return total


def table(counts: Mapping[str, Count]) -> str:
    """The counts in Markdown, with their sum."""
    total = Count()
    names = ("bits of", "flipped", "found", "mended", "refused", "ignored", "missed")
    rows = [names, ("---", *["---:"] * 6)]
    for region, count in sorted(counts.items()):
        total.add(count)
        rows.append(_row(region, count))
    rows.append(_row("all", total))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, count: Count) -> tuple[str, ...]:
    found = (count.flips, count.found, count.mended, count.refused, count.ignored, count.missed)
    return (name, *(f"{number:,}" for number in found))
