"""All ways in turn, again and again while time is left, and the report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers import comparison, jobs
from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.environment import default_folder, prepared
from benchmarks.table import markdown

INTRODUCTION = """\
Two ranks on a node each, {mib} MiB a rank; forward and backward of {work:g} copies of the state, a
save in every {every} iterations. Times are in copies of the state, medians over rounds in {cycles}
cycles in which all ways took turns; every job compares itself with its own phases without saves.
*Lost per save*: training time. *Blocked*, *safe*: a single save. Bold: a peer is ahead of us.
"""


@dataclass(frozen=True)
class Sizes:
    """Of a job; see ``rank.Plan``."""

    mib: int
    tensors: int = 16
    work: float = 8.0
    every: int = 3
    iterations: int = 6
    rounds: int = 7
    incarnations: int = 7

    @property
    def wanted(self) -> int:
        """Saves asked for in a phase."""
        return -(-self.iterations // self.every)


def run(sizes: Sizes, minutes: float, ways: Sequence[str]) -> tuple[int, list[jobs.Found]]:
    """Cycles done, at least one, and what their jobs found; peers are installed first."""
    ours = Path(sys.executable)
    theirs = prepared(default_folder()) if any(WAYS[way].installed for way in ways) else ours

    def job(way: str) -> jobs.Found:
        started = time.monotonic()
        python = theirs if WAYS[way].installed else ours
        found = jobs.run(way, python, **asdict(sizes))
        said = found.why or "done"
        print(f"{way}: {said}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return found

    return cycles(ways, job, 60 * minutes, time.monotonic)


def cycles(
    ways: Sequence[str],
    job: Callable[[str], jobs.Found],
    seconds: float,
    clock: Callable[[], float],
) -> tuple[int, list[jobs.Found]]:
    """Every way in turn, and again while the longest cycle so far fits into what is left.

    A way that cannot run is not tried a second time.
    """
    began, longest, count = clock(), 0.0, 0
    found: list[jobs.Found] = []
    while not count or clock() - began + longest <= seconds:
        started = clock()
        failed = {one.way for one in found if one.why}
        found += [job(way) for way in ways if way not in failed]
        longest, count = max(longest, clock() - started), count + 1
    return count, found


def report(sizes: Sizes, count: int, found: Sequence[jobs.Found], place: str) -> tuple[str, str]:
    """Markdown and JSON."""
    entries = comparison.measured(found, sizes.wanted)
    rows = comparison.limits(entries)
    about = INTRODUCTION.format(**asdict(sizes), cycles=count)
    text = "\n\n".join([place, about.rstrip(), comparison.table(entries), markdown(rows)])
    data = {
        "place": place,
        "sizes": asdict(sizes),
        "cycles": count,
        "ways": [{**asdict(e), "label": WAYS[e.way].label} for e in entries],
        "limits": [{**asdict(row), "median": row.median, "met": row.met} for row in rows],
    }
    return text + "\n", json.dumps(data, indent=1) + "\n"
