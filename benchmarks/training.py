"""What saving costs a training: whole jobs, with us and with what torch itself brings."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks import bookkeeping, neighbours
from benchmarks.jobs import Jobs, alone, supervised
from benchmarks.program import Plan
from benchmarks.table import Row

SPARE_CORES = 4
"""With so many cores two ranks leave some for copies and parity, and the shadow has a limit."""

NAMES = {"inmem": "megatron-ft, xor:2", "dcp": "DCP async_save", "torch.save": "torch.save"}


def parts(mib: int, jobs: Jobs) -> Iterator[Iterator[Row]]:
    """Stall and shadow, bookkeeping of each framework, blocked, safe: one job each."""
    yield _one_rank(mib, jobs)
    if jobs.device == "cpu":
        yield _bare(mib, jobs)
        yield _control(mib, jobs)
    yield _short(mib, jobs)
    yield _bookkeeping(jobs)
    yield from bookkeeping.parts(jobs)
    for method, name in NAMES.items():
        yield _beside(method, name, mib, jobs)


def _one_rank(mib: int, jobs: Jobs) -> Iterator[Row]:
    """Where forward and backward hide the copy: held time of an iteration, and the shadow.

    A rank of one thread leaves all other cores to copies and digests.
    """
    found = _run(1, jobs, method="inmem", **_hiding(mib, jobs))
    shares = [_held(one) / one["total"] for one in _saving(found["phases"])]
    name = "stall, forward+backward of 4 copies"
    yield Row(name, tuple(100 * share for share in shares), "% of an iteration", 1.0, False)
    limit = 0.98 if (os.cpu_count() or 1) > 1 else None
    name = "shadow with a core to spare: one rank, 4 copies"
    yield neighbours.row(name, found["phases"][0], limit=limit)


def _bare(mib: int, jobs: Jobs) -> Iterator[Row]:
    """What the least that any way of saving does costs the same iterations."""
    found = _run(1, jobs, method="bare", **_hiding(mib, jobs))
    note = "yardstick: a thread that copies the state and takes CRCs, nothing else; "
    yield neighbours.row("the same with bare copies", found["phases"][0], note=note)


def _control(mib: int, jobs: Jobs) -> Iterator[Row]:
    """What the machine makes of such pairs by itself: nothing is saved in either."""
    found = _run(1, jobs, method="inmem", control=True, **_hiding(mib, jobs))
    note = "control: the machine's own scatter; "
    name = "the same with saves in neither"
    yield neighbours.row(name, found["phases"][0], control=True, note=note)


def _hiding(mib: int, jobs: Jobs) -> dict[str, Any]:
    """What one rank does to hide a copy, in every second iteration."""
    return {
        "tensors": 16,
        "mib": mib,
        "work": 4,
        "every": 2,
        "phase": 2 * neighbours.PAIRS * jobs.rounds,
    }


def _short(mib: int, jobs: Jobs) -> Iterator[Row]:
    """Held time beyond what a copy takes longer than forward and backward, in copies."""
    found = _run(1, jobs, method="inmem", tensors=16, mib=mib, work=0.5, copies=True)
    excess = [
        (_held(one) - max(0.0, one["copy"] - one["work"])) / one["copy"]
        for one in _saving(found["phases"][1::2])
    ]
    name = "stall beyond copy - (forward+backward of 0.5 copies)"
    yield Row(name, tuple(100 * part for part in excess), "% of a copy", 2.0, False)


def _bookkeeping(jobs: Jobs) -> Iterator[Row]:
    """Time of save() besides copying, of 2,000 tensors."""
    found = _run(1, jobs, method="inmem", tensors=2000, mib=32, work=10)
    calls = tuple(1000 * one["save"] for one in _saving(found["phases"][1::2]))
    name, limit = "save() with 2,000 tensors of 16 KiB", bookkeeping.LIMIT_MS
    yield Row(name, calls, "ms", limit, False, note="plain API, a mapping of tensors alone")


def _beside(method: str, name: str, mib: int, jobs: Jobs) -> Iterator[Row]:
    """Two ranks, each on a node of its own: the shadow, then single saves."""
    found = _run(2, jobs, method=method, tensors=16, mib=mib, work=8, singles=True)
    ours = method == "inmem"
    yield _shadow(f"shadow: {name}", found, SPARE_CORES if ours else None)
    for figure, bound in (("blocked", 1.05), ("safe", 4.1)):
        samples = tuple(one[figure] / one["copy"] for one in found["singles"])
        yield Row(f"{figure}: {name}", samples, "x copy", bound if ours else None, False)


def _shadow(name: str, found: dict[str, Any], cores: int | None) -> Row:
    """Speed of phases with saves against those without; a limit where there are enough cores."""
    saving = found["phases"][1::2]
    saved = statistics.mean(one["saved"] for phase in saving for one in phase)
    limit = 0.98 if cores is not None and (os.cpu_count() or 1) >= cores else None
    pairs = zip(found["phases"][::2], saving, strict=True)
    speeds = tuple(_mean(first, "total") / _mean(second, "total") for first, second in pairs)
    return Row(name, speeds, neighbours.SPEED, limit, note=f"saves in {saved:.0%} of iterations")


def _saving(phases: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Iterations that saved, each with the fence that followed in the next one."""
    joined = []
    for phase in phases:
        for one, following in zip(phase, phase[1:], strict=False):
            if one["saved"]:
                joined.append({**one, "fence": following["fence"], "work": following["work"]})
    if not joined:
        raise RuntimeError(neighbours.NONE_TAKEN)
    return joined


def _held(one: dict[str, float]) -> float:
    return one["save"] + one["fence"]


def _mean(phase: list[dict[str, float]], figure: str) -> float:
    return statistics.mean(one[figure] for one in phase)


def _run(ranks: int, jobs: Jobs, *, method: str, **plan: Any) -> dict[str, Any]:
    """One job to its end; what its rank 0 measured."""
    with jobs.folder() as folder:
        out = folder / "measured.json"
        text = msgspec.json.encode(
            Plan(
                method=method,
                out=str(out),
                folder=str(folder),
                device=jobs.device,
                **{"rounds": jobs.rounds, "phase": 8, **plan},
            )
        ).decode()
        program = [sys.executable, "-m", "benchmarks.program", text]
        if method == "inmem":
            supervised(program, ranks, folder, jobs.limit_seconds, plan.get("every", 1))
        else:
            alone(program, ranks, jobs.limit_seconds)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
