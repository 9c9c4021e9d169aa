"""Makes Megatron's training loop write a trace: see trace.py for its lines.

Imports Megatron, so it is imported by training processes only.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args, training

from megatron_ft.environment import INCARNATION
from megatron_ft.testing import final_state
from megatron_ft.testing.trace import TraceLine, final_path, trace_path


class Trace:
    """Appends this rank's lines to its file and flushes each at once."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = trace_path(directory, rank).open("a", encoding="ascii")
        self._rank = rank
        self._incarnation = int(os.environ.get(INCARNATION, "0"))
        self._samples: list[int] = []
        self._last_end: float | None = None

    def observe(self, sample: int) -> None:
        """Note the index of a sample that was read for the iteration under way."""
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


def _loss(result: Any) -> float | None:
    losses: dict[str, Any] = result[0]
    return float(losses["lm loss"]) if "lm loss" in losses else None


def _traced_step(step: Any, directory: Path) -> Any:
    traces: list[Trace] = []

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not traces:  # ranks are known only now
            traces.append(Trace(directory, torch.distributed.get_rank()))
            GPTDataset.__getitem__ = _observed(GPTDataset.__getitem__, traces[0])
        traces[0].begin()
        started = time.perf_counter()
        result = step(*args, **kwargs)
        traces[0].record(get_args().curr_iteration + 1, _loss(result), started)
        return result

    return traced


def _observed(read: Any, trace: Trace) -> Any:
    @functools.wraps(read)
    def observed(self: Any, idx: int | None) -> Any:
        trace.observe(-1 if idx is None else int(idx))
        return read(self, idx)

    return observed


def _traced_train(train: Any, directory: Path) -> Any:
    signature = inspect.signature(train)

    @functools.wraps(train)
    def traced(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        live = (given["model"], given["optimizer"], given["opt_param_scheduler"])
        try:
            result = train(*args, **kwargs)
        except SystemExit:  # how --exit-interval leaves, with the state of an iteration's end
            _write_final(directory, *live)
            raise
        _write_final(directory, *live)
        return result

    return traced


def _write_final(directory: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    iteration = getattr(get_args(), "curr_iteration", -1) + 1
    state = final_state.collect(model, optimizer, scheduler, iteration)
    directory.mkdir(parents=True, exist_ok=True)
    final_state.write(final_path(directory, torch.distributed.get_rank()), state)


def install(directory: Path) -> None:
    """Wrap ``train_step`` and ``train`` of Megatron's loop to write into ``directory``."""
    training.train_step = _traced_step(training.train_step, directory)
    training.train = _traced_train(training.train, directory)
