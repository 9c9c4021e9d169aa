"""What snapshots have cost and how safe they are, as named figures for a framework's logs."""

from __future__ import annotations

from typing import NamedTuple

from megatron_ft.trainer.stats import NEVER, CaptureStats

TAG = "inmem-snapshot/"
"""What the names of figures begin with in TensorBoard, W&B and the like."""

_MEBI = 1 << 20


class Figure(NamedTuple):
    """One figure: its name in TensorBoard and W&B, its words in the text, its value, its form."""

    name: str
    words: str
    value: float
    form: str


def figures(stats: CaptureStats) -> list[Figure]:
    """What is logged; iterations that do not exist yet are left out."""
    last = stats.last
    found = [
        Figure("captured-iteration", "captured iteration", last.iteration, "8d"),
        Figure("capture-ms", "capture time (ms)", 1000 * last.seconds, ".1f"),
        Figure("stall-ms", "stall (ms)", 1000 * last.stall_seconds, ".1f"),
        Figure("mib", "size (MiB)", last.copied_bytes / _MEBI, ".1f"),
    ]
    safety = [
        Figure("protected-iteration", "protected iteration", stats.protected_iteration, "8d"),
        Figure("committed-iteration", "committed iteration", stats.committed_iteration, "8d"),
    ]
    counts = [
        Figure("taken", "taken", stats.taken, "d"),
        Figure("skipped", "skipped", stats.due_skipped, "d"),
        Figure("missed", "missed", stats.missed, "d"),
        Figure("abandoned", "abandoned", stats.abandoned, "d"),
    ]
    captured = found if last.iteration != NEVER else []
    return captured + [figure for figure in safety if figure.value != NEVER] + counts
