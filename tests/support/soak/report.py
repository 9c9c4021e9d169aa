"""The result of a soak as text."""

from __future__ import annotations

from tests.support.soak.flatness import Line
from tests.support.soak.run import ENDS, Result

_UNITS = {"anonymous": (1 << 20, "MiB"), "shared": (1 << 20, "MiB")}
_NAMES = {"anonymous": "memory", "shared": "arenas mapped"}


def render(result: Result, lines: list[Line]) -> str:
    """Tables in Markdown: what happened, and what each role's processes had."""
    return "\n".join([*_story(result), "", *_growth(lines), "", verdict(result, lines)])


def is_good(result: Result, lines: list[Line]) -> bool:
    """Whether the job went to its end, bit by bit the same, and nothing grew."""
    ended_well = not result.problem and not result.differences
    return ended_well and all(line.flat for line in lines)


def verdict(result: Result, lines: list[Line]) -> str:
    """One sentence, or several."""
    if result.problem:
        return f"NOT WELL: {result.problem}"
    if result.differences:
        return f"DIFFERENT in {len(result.differences)} places: {result.differences[0]}"
    same = (
        f"Identical, bit by bit, to the run that was never interrupted: {result.iterations} "
        f"iterations of {result.soak.nodes * result.soak.ranks_per_node} ranks."
    )
    grown = [f"{line.role}: {line.bound.quantity}" for line in lines if not line.flat]
    return f"{same} {'NOT FLAT: ' + ', '.join(grown) if grown else 'Nothing grew.'}"


def _story(result: Result) -> list[str]:
    counts, soak = result.counts, result.soak
    rows = [
        ("snapshots taken", result.taken),
        ("committed, protected", counts["committed protected"]),
        ("committed, local", counts["committed local"]),
        ("given up", sum(counts[kind] for kind in ENDS[1:])),
        *((f"fault: {kind}", number) for kind, number in sorted(result.faults.items())),
        *((name, number) for name, number in sorted(counts.items()) if "restored" in name),
        *((f"ranks restarted {kind}", number) for kind, number in result.restarts.items()),
        ("damage found, shards", counts["corrupt"]),
        ("incarnations (starts of all trainers)", counts["trainers_started"]),
        ("iterations", result.iterations),
        ("seconds", round(result.seconds)),
    ]
    title = (
        f"{soak.nodes} nodes x {soak.ranks_per_node} ranks, {soak.spares} spares, {soak.protect}, "
        f"seed {soak.seed}"
    )
    return [f"| {title} | |", "| --- | ---: |", *(f"| {a} | {b} |" for a, b in rows)]


def _growth(lines: list[Line]) -> list[str]:
    names = ("role", "what", "processes", "samples", "first", "last")
    head = " | ".join((*names, "slope a snapshot (bound)", "rise (bound)", ""))
    rule = "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    return [f"| {head}|", rule, *map(_row, lines)]


def _row(line: Line) -> str:
    bound = line.bound
    unit, name = _UNITS.get(bound.quantity, (1, ""))
    small, small_name = (1024, " KiB") if unit > 1 else (1, "")
    name = f" {name}" if name else ""
    cells = (
        line.role,
        _NAMES.get(bound.quantity, bound.quantity),
        line.processes,
        line.samples,
        f"{line.first / unit:.1f}{name}",
        f"{line.last / unit:.1f}{name}",
        f"{line.slope / small:.4f}{small_name} ({bound.slope / small:g})",
        f"{line.rise / unit:.1f}{name} ({bound.rise / unit:g})",
        "flat" if line.flat else "NOT FLAT",
    )
    return f"| {' | '.join(map(str, cells))} |"
