"""Makes Megatron's training loop write a trace: see trace.py for its lines.

Imports Megatron, so it is imported by training processes only.
"""

from __future__ import annotations

import functools
import inspect
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args, training

from megatron_ft.cli.demo import final_state
from megatron_ft.cli.demo.trace import final_path
from megatron_ft.cli.demo.trace_writer import TraceWriter


def _loss(result: Any) -> float | None:
    losses: dict[str, Any] = result[0]
    return float(losses["lm loss"]) if "lm loss" in losses else None


def _traced_step(step: Any, directory: Path) -> Any:
    traces: list[TraceWriter] = []

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not traces:  # ranks are known only now
            traces.append(TraceWriter(directory, torch.distributed.get_rank()))
            GPTDataset.__getitem__ = _observed(GPTDataset.__getitem__, traces[0])
        traces[0].begin()
        started = time.perf_counter()
        result = step(*args, **kwargs)
        traces[0].record(get_args().curr_iteration + 1, _loss(result), started)
        return result

    return traced


def _observed(read: Any, trace: TraceWriter) -> Any:
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
