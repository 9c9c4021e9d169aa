"""Rows of a benchmark: what was measured, against which limit, and whether it was met."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One figure: the median of ``samples`` in ``unit``, and what it must not miss.

    ``limit`` is in the same unit; ``more`` says whether more is better.  None: reported only.
    A row without samples says in its ``note`` why there are none.
    """

    name: str
    samples: tuple[float, ...]
    unit: str = "x"
    limit: float | None = None
    more: bool = True
    note: str = ""

    @property
    def median(self) -> float | None:
        """The figure that counts; None without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None where there is none, or nothing to hold against it."""
        median = self.median
        if self.limit is None or median is None:
            return None
        return median >= self.limit if self.more else median <= self.limit

    def cells(self) -> list[str]:
        """The row's cells in Markdown."""
        sign = "≥" if self.more else "≤"
        limit = "" if self.limit is None else f"{sign} {_number(self.limit)} {self.unit}"
        median = self.median
        if median is None:
            return [self.name, "", "", "0", limit, "", self.note]
        spread = f"{_number(min(self.samples))} to {_number(max(self.samples))}"
        verdict = {None: "", True: "yes", False: "**no**"}[self.met]
        figure = f"{_number(median)} {self.unit}"
        return [self.name, figure, spread, str(len(self.samples)), limit, verdict, self.note]


HEAD = ["what", "median", "range", "n", "limit", "met", "note"]


def markdown(rows: Sequence[Row]) -> str:
    """All rows as a table."""
    lines = [HEAD, ["---", "---:", "---:", "---:", "---:", "---", "---"]]
    lines += [row.cells() for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_json(rows: Sequence[Row], place: str, failed: Sequence[str] = ()) -> str:
    """All rows, with where they were measured, and what could not be."""
    found = [{**asdict(row), "median": row.median, "met": row.met} for row in rows]
    return json.dumps({"place": place, "rows": found, "failed": list(failed)}, indent=1) + "\n"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
