"""Traces: lines that a training writes, by which two runs of it are compared bit by bit.

Each rank appends to ``rank<r>.jsonl`` in a folder one JSON object per iteration: "iteration",
and whatever must be the same in a run that nothing interrupts (a loss, digests).  A training
under `megatron-ft chaos` finds the folder in ``$MEGATRON_FT_CHAOS_TRACE``.  Lines of the demo's
trainings hold times as well (TraceLine).  Imports no framework.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.core.environment import INCARNATION

VARIABLE = "MEGATRON_FT_CHAOS_TRACE"
GATE = "gate"

Lines = list[dict[str, Any]]
"""Lines of one rank, in the order written; iterations that were trained again are there again."""


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def final_path(folder: Path, rank: int) -> Path:
    """The file that holds one rank's state at the end of its run."""
    return folder / f"final-rank{rank}.pt"


class Trace:
    """Appends one rank's lines; writes nowhere if no trace is wanted."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._starts = None if folder is None else folder / f"start{rank}.jsonl"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = os.devnull if folder is None else str(trace_path(folder, rank))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @classmethod
    def from_env(cls, rank: int) -> Trace:
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder) if folder else None, rank)

    def write(self, iteration: int, **values: object) -> None:
        """Append one line in one write, so that a kill leaves no half of it."""
        line = json.dumps({"iteration": iteration, **values}) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Write no more: a process that restarts in itself opens another one."""
        os.close(self._descriptor)

    def started(self, iteration: int) -> None:
        """Record the iteration from which this process of the rank starts, and when."""
        if self._starts is not None:
            with self._starts.open("a") as file:
                file.write(json.dumps({"at": time.monotonic(), "iteration": iteration}) + "\n")


def read_traces(folder: Path, ranks: int) -> dict[int, Lines]:
    """The lines of each rank that has written any."""
    paths = {rank: trace_path(folder, rank) for rank in range(ranks)}
    return {
        rank: [json.loads(line) for line in path.read_text().splitlines()]
        for rank, path in paths.items()
        if path.exists()
    }


def differences(ours: Mapping[int, Lines], oracle: Mapping[int, Lines]) -> Iterable[str]:
    """Every line, of every incarnation, that the uninterrupted run does not have like this."""
    for rank, lines in ours.items():
        expected = {line["iteration"]: line for line in oracle.get(rank, [])}
        for line in lines:
            other = expected.get(line["iteration"])
            where = f"rank {rank} iteration {line['iteration']}"
            if other is None:
                yield f"{where}: not in the uninterrupted run"
            elif other != line:
                changed = [name for name in line if line[name] != other.get(name)]
                yield f"{where}: {', '.join(changed)} differ from the uninterrupted run"


def gaps(ours: Mapping[int, Lines]) -> Iterable[str]:
    """Iterations that some rank left out: after each line comes the next one, or a repetition."""
    for rank, lines in ours.items():
        numbers = [line["iteration"] for line in lines]
        for before, after in zip([0, *numbers], numbers, strict=False):
            if after > before + 1:
                yield f"rank {rank} went from iteration {before} to {after}"


class TraceLine(msgspec.Struct, frozen=True):
    """One iteration of one rank of a framework's training.

    ``loss`` is float.hex of what the step returned, None where this rank has none (Megatron's
    log lines average the first two).  ``samples`` name what this rank read: indices, or
    checksums of the contents.  ``seconds`` is the time since the last step ended, so with
    snapshots, checkpoints and logging, ``time`` the end of the step in seconds since the epoch.
    ``pid`` is the process that trained it.
    """

    incarnation: int
    iteration: int
    loss: str | None
    samples: list[int]
    seconds: float
    time: float
    pid: int = 0

    @property
    def loss_value(self) -> float | None:
        return None if self.loss is None else float.fromhex(self.loss)


def set_gate(folder: Path, iteration: int | None) -> None:
    """Make ranks with a TraceWriter wait after this iteration, and after any later one.

    They continue when the gate is later than where they are; None removes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if iteration is None:
        (folder / GATE).unlink(missing_ok=True)
        return
    half = folder / f"{GATE}.half"
    half.write_text(str(iteration))
    half.replace(folder / GATE)


class TraceWriter:
    """Appends this rank's TraceLines."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._trace, self._gate = Trace(folder, rank), folder / GATE
        self._incarnation = 0
        self._samples: list[int] = []
        self._last_end: float | None = None

    def observe(self, sample: int) -> None:
        self._samples.append(sample)

    def begin(self) -> None:
        """An iteration begins: samples read since the last one were for an evaluation."""
        self._samples = []

    def record(self, iteration: int, loss: float | None, started: float) -> None:
        """Write the line of an iteration that began at ``started`` (time.perf_counter).

        Returns when the gate, if there is one, is a later iteration.
        """
        ended, incarnation = time.perf_counter(), int(os.environ.get(INCARNATION, "0"))
        # A process that restarts in itself trains in several incarnations.
        if self._last_end is None or incarnation != self._incarnation:
            self._incarnation, self._last_end = incarnation, started
        self._trace.write(
            iteration,
            incarnation=self._incarnation,
            loss=None if loss is None else loss.hex(),
            samples=self._samples,
            seconds=round(ended - self._last_end, 6),
            time=round(time.time(), 3),
            pid=os.getpid(),
        )
        while iteration >= self._may_finish():
            time.sleep(0.02)
        self._samples, self._last_end = [], time.perf_counter()

    def _may_finish(self) -> float:
        try:
            return float(self._gate.read_text())
        except FileNotFoundError:
            return math.inf


class TraceTail:
    """Reads one rank's TraceLines, also while they are being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._decoder = msgspec.json.Decoder(TraceLine)

    def read(self) -> list[TraceLine]:
        """Lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        self._offset += len(complete) + bool(complete)
        return [self._decoder.decode(line) for line in complete.splitlines()]


def read_trace(folder: Path, rank: int) -> list[TraceLine]:
    """All complete lines of a rank in the order written, [] if there is no file."""
    return TraceTail(trace_path(folder, rank)).read()


def final_lines(lines: Sequence[TraceLine]) -> dict[int, TraceLine]:
    """The line that counts for each iteration: the last one, as iterations may be repeated."""
    return {line.iteration: line for line in lines}
