"""What a training command may write so that every bit of a chaos run can be compared.

Each rank appends to ``$MEGATRON_FT_CHAOS_TRACE/rank<r>.jsonl`` one JSON object per iteration:
"iteration", and whatever must be the same in a run that nothing interrupts (a loss, digests).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MEGATRON_FT_CHAOS_TRACE"

Lines = list[dict[str, Any]]
"""Of one rank, in the order written; iterations that were trained again are there again."""


class Trace:
    """Appends one rank's lines; a place to write nothing to if no trace is wanted."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._starts = None if folder is None else folder / f"start{rank}.jsonl"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = os.devnull if folder is None else str(folder / f"rank{rank}.jsonl")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @classmethod
    def from_env(cls, rank: int) -> Trace:
        """The trace that this process's environment asks for."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder) if folder else None, rank)

    def write(self, iteration: int, **values: object) -> None:
        """One line in one write, so that a kill leaves no half of it."""
        line = json.dumps({"iteration": iteration, **values}) + "\n"
        os.write(self._descriptor, line.encode())

    def started(self, iteration: int) -> None:
        """From which iteration this process of the rank starts, and when."""
        if self._starts is not None:
            with self._starts.open("a") as file:
                file.write(json.dumps({"at": time.monotonic(), "iteration": iteration}) + "\n")


def read_starts(folder: Path) -> list[tuple[float, int]]:
    """Moment and iteration of every start of every rank."""
    lines = [line for path in folder.glob("start*.jsonl") for line in path.read_text().splitlines()]
    return [(start["at"], start["iteration"]) for start in map(json.loads, lines)]


def read_traces(folder: Path, ranks: int) -> dict[int, Lines]:
    """The lines of every rank that wrote some."""
    found = {}
    for rank in range(ranks):
        path = folder / f"rank{rank}.jsonl"
        if path.exists():
            found[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def differences(ours: Mapping[int, Lines], oracle: Mapping[int, Lines]) -> Iterable[str]:
    """Every line, of every incarnation, that the uninterrupted run does not have like this."""
    for rank, lines in ours.items():
        expected = {line["iteration"]: line for line in oracle.get(rank, [])}
        for line in lines:
            other = expected.get(line["iteration"])
            if other is None:
                yield f"rank {rank} iteration {line['iteration']}: not in the uninterrupted run"
            elif other != line:
                changed = [name for name in line if line[name] != other.get(name)]
                yield (
                    f"rank {rank} iteration {line['iteration']}: {', '.join(changed)} differ from "
                    "the uninterrupted run"
                )


def gaps(ours: Mapping[int, Lines]) -> Iterable[str]:
    """Iterations that some rank left out: after each line comes the next one, or a repetition."""
    for rank, lines in ours.items():
        numbers = [line["iteration"] for line in lines]
        for before, after in zip([0, *numbers], numbers, strict=False):
            if after > before + 1:
                yield f"rank {rank} went from iteration {before} to {after}"
