"""Writing the traces of trace.py, in a training process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TextIO

import msgspec

from megatron_ft.cli.demo.trace import TraceLine, trace_path
from megatron_ft.core.environment import INCARNATION


class TraceWriter:
    """Appends this rank's lines to its file and flushes each at once."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = trace_path(directory, rank).open("a", encoding="ascii")
        self._rank = rank
        self._incarnation = int(os.environ.get(INCARNATION, "0"))
        self._samples: list[int] = []
        self._last_end: float | None = None

    def observe(self, sample: int) -> None:
        """Note a sample that was read for the iteration under way."""
        self._samples.append(sample)

    def begin(self) -> None:
        """An iteration begins: what was read since the last one was for an evaluation."""
        self._samples = []

    def record(self, iteration: int, loss: float | None, started: float) -> None:
        """Write the line of an iteration that began at ``started`` (time.perf_counter)."""
        ended = time.perf_counter()
        since = started if self._last_end is None else self._last_end
        line = TraceLine(
            rank=self._rank,
            incarnation=self._incarnation,
            iteration=iteration,
            loss=None if loss is None else loss.hex(),
            samples=self._samples,
            step_seconds=round(ended - started, 6),
            seconds=round(ended - since, 6),
            time=round(time.time(), 3),
        )
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()
        self._samples, self._last_end = [], ended
