"""What jobs have measured as one table, and whether we lead; pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.jobs import Found
from benchmarks.table import Row

OURS = "ours"
SPEED, LOST, KEPT = "iterations/s, to none", "lost per save", "saves kept"
BLOCKED, SAFE, LOAD, FLUSH = "blocked", "safe from a node's loss", "load", "still to flush"
COLUMNS = (SPEED, LOST, KEPT, BLOCKED, SAFE, LOAD, FLUSH)
MORE_IS_BETTER = (SPEED, KEPT)
LIMITS = ((BLOCKED, 1.05), (SAFE, 4.1), (LOAD, 1.5), (FLUSH, 0.0))
MARGIN = 0.02
"""Medians nearer than this share of ours count as equal."""


@dataclass(frozen=True)
class Measured:
    """All samples of one way by column; times are in copies of the state."""

    way: str
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    wrong: bool = False
    why: str = ""

    def median(self, column: str) -> float | None:
        """The figure that counts, if there is one."""
        found = self.samples.get(column, ())
        return statistics.median(found) if found else None


def measured(found: Sequence[Found], wanted: int) -> list[Measured]:
    """One entry a way, of all its jobs; ``wanted``: saves asked for in a phase."""
    ways = dict.fromkeys(one.way for one in found)
    return [_merged([one for one in found if one.way == way], wanted) for way in ways]


def _merged(jobs: Sequence[Found], wanted: int) -> Measured:
    way = jobs[0].way
    done = [job for job in jobs if not job.why]
    if not done:
        return Measured(way, why=jobs[0].why)
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(COLUMNS, ())
    for job in done:
        for column, values in _figures(job, wanted).items():
            samples[column] += tuple(values)
    return Measured(way, samples, any(not load["right"] for job in done for load in job.loads))


def _figures(job: Found, wanted: int) -> dict[str, list[float]]:
    figures = {SPEED: [pair["off"] / pair["on"] for pair in job.pairs]}
    if not job.singles:
        return figures
    copy = statistics.median(one["copy"] for one in job.singles)
    saving = [pair for pair in job.pairs if pair["saved"]]
    figures[LOST] = [(pair["on"] - pair["off"]) / pair["saved"] / copy for pair in saving]
    figures[KEPT] = [pair["saved"] / wanted for pair in job.pairs]
    figures[BLOCKED] = [one["blocked"] / one["copy"] for one in job.singles]
    figures[SAFE] = [one["safe"] / one["copy"] for one in job.singles]
    figures[LOAD] = [one["load"] / one["copy"] for one in job.loads]
    figures[FLUSH] = [flush / copy for flush in job.flushes or (0.0,)]
    return figures


def ahead(column: str, theirs: float, ours: float) -> bool:
    """Whether a peer's figure is better than ours by more than the margin."""
    gain = theirs - ours if column in MORE_IS_BETTER else ours - theirs
    return gain > MARGIN * abs(ours)


def table(entries: Sequence[Measured]) -> str:
    """Markdown; a peer's figure in bold where we do not lead."""
    ours = next((entry for entry in entries if entry.way == OURS), None)
    lines = [["way", *COLUMNS, "n", "note"], ["---", *["---:"] * (len(COLUMNS) + 1), "---"]]
    lines += [_line(entry, ours) for entry in entries]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _line(entry: Measured, ours: Measured | None) -> list[str]:
    way = WAYS[entry.way]
    if entry.why:
        return [way.label, *[""] * (len(COLUMNS) + 1), f"does not run here: {entry.why}"]
    note = "; ".join(filter(None, [way.note, "**wrong values loaded**" * entry.wrong]))
    cells = [_cell(entry, column, ours) for column in COLUMNS]
    return [way.label, *cells, str(len(entry.samples[SPEED])), note]


def _cell(entry: Measured, column: str, ours: Measured | None) -> str:
    value = entry.median(column)
    if value is None:
        return ""
    text = f"{value:.0%}" if column == KEPT else f"{value:.3g}"
    return f"**{text}**" if ours and _leads(entry, column, ours) else text


def _leads(entry: Measured, column: str, ours: Measured) -> bool:
    """Whether this is a peer whose figure is better than ours.

    How often saves were kept is no merit of its own: it qualifies the speed.
    """
    theirs, own = entry.median(column), ours.median(column)
    if not WAYS[entry.way].peer or column == KEPT or theirs is None or own is None:
        return False
    return ahead(column, theirs, own)


def limits(entries: Sequence[Measured]) -> list[Row]:
    """Our figures against their limits, and against the best of the peers."""
    ours = next((entry for entry in entries if entry.way == OURS), None)
    if ours is None or ours.why:
        return []
    rows = [
        Row(column, ours.samples[column], "copies", limit, more=False)
        for column, limit in LIMITS
        if ours.samples[column]
    ]
    return [*rows, *(_lead(column, ours, entries) for column in (SPEED, LOST, BLOCKED, SAFE, LOAD))]


def _lead(column: str, ours: Measured, entries: Sequence[Measured]) -> Row:
    """How many peers are ahead of us; none is the limit."""
    better = [WAYS[entry.way].label for entry in entries if _leads(entry, column, ours)]
    name = f"peers ahead of us: {column}"
    notes = [*better, *_fewer_saves(column, ours)]
    return Row(name, (float(len(better)),), "peers", 0.0, more=False, note="; ".join(notes))


def _fewer_saves(column: str, ours: Measured) -> list[str]:
    """A speed at fewer saves than were asked for is said to be such."""
    kept = ours.median(KEPT)
    return [f"ours with {kept:.0%} of the saves"] if column == SPEED and (kept or 0) < 1 else []
