"""The measured restarts as tables: parts for people, and rows with limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from benchmarks.restart.runs import Restart
from benchmarks.restart.trainings import TRAININGS
from benchmarks.table import Row
from megatron_ft.supervisor.heartbeats import PARTS

HEAD = (
    *("training", "fault", "n", "median", "worst", *PARTS),
    *("survivors kept", "restart", "imports of torch", "identical"),
)

FAULTS = {
    "trainer": "trainer killed",
    "node": "node lost, a spare takes its place",
    "trainer and encoder": "trainer and encoder killed",
}


def table(found: Sequence[Restart], absent: Mapping[str, str]) -> str:
    """A line for each fault of each training, in Markdown; ``absent`` says why one has none."""
    lines = [HEAD, ("---", "---", *["---:"] * (len(HEAD) - 4), "---", "---:", "---")]
    lines += [_line(*key, ones) for key, ones in _groups(found)]
    lines += [(label, "", "0", why, *[""] * (len(HEAD) - 4)) for label, why in absent.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _line(training: str, fault: str, ones: Sequence[Restart]) -> tuple[str, ...]:
    times = [one.seconds for one in ones if one.seconds is not None]
    whole = [one for one in ones if len(one.parts) == len(PARTS)]
    parts = [f"{median(one.parts[p] for one in whole):.2f}" if whole else "" for p in PARTS]
    starts = sum((Counter(one.starts) for one in ones), Counter[str]())
    same = [one.identical for one in ones if one.identical is not None]
    return (
        _label(training),
        FAULTS[fault],
        str(len(ones)),
        f"{median(times):.2f} s" if times else "never",
        f"{max(times):.2f} s" if times else "never",
        *parts,
        f"{sum(one.kept for one in ones)} of {sum(one.survivors for one in ones)}",
        ", ".join(f"{count} {kind}" for kind, count in starts.items()),
        str(sum(one.imports for one in ones)),
        ("yes" if all(same) else f"**{same.count(False)} not**") if same else "not compared",
    )


def limits(found: Sequence[Restart]) -> list[Row]:
    """Rows that hold the times of each training against its limits."""
    rows = []
    for (training, fault), ones in _groups(found):
        if (held := TRAININGS.get(training)) is None:
            continue
        times = tuple(one.seconds for one in ones if one.seconds is not None)
        name = f"{held.label}: {FAULTS[fault]}"
        limit = held.median.get(fault, held.median[""])
        rows.append(Row(name, times, "s", limit, more=False))
        if worst := held.worst.get(fault, held.worst.get("")):
            rows.append(Row(f"{name}, worst", (max(times, default=0.0),), "s", worst, more=False))
        rows += _counts(name, ones)
    return rows


def _counts(name: str, ones: Sequence[Restart]) -> Iterator[Row]:
    ended = sum(one.seconds is not None for one in ones)
    yield Row(f"{name}, restarts that trained again", (ended,), "", len(ones))
    kept, survivors = sum(one.kept for one in ones), sum(one.survivors for one in ones)
    yield Row(f"{name}, survivors' processes kept", (kept,), "", survivors)
    imports = sum(one.imports for one in ones)
    yield Row(f"{name}, imports of torch", (imports,), "", 0, more=False)
    same = sum(bool(one.identical) for one in ones)
    yield Row(f"{name}, identical to the uninterrupted run", (same,), "", len(ones))


def _groups(found: Sequence[Restart]) -> Iterator[tuple[tuple[str, str], list[Restart]]]:
    order = list(dict.fromkeys(one.training for one in found)), list(FAULTS)

    def place(one: Restart) -> tuple[int, int]:
        return order[0].index(one.training), order[1].index(one.fault)

    for _, group in groupby(sorted(found, key=place), place):
        ones = list(group)
        yield (ones[0].training, ones[0].fault), ones


def _label(training: str) -> str:
    held = TRAININGS.get(training)
    return training if held is None else held.label
