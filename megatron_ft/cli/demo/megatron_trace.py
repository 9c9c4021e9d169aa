"""Makes Megatron's training loop write a trace, and its whole state at the end.

Lines are those of cli/chaos/trace.py.  Imports Megatron, so only training processes import it.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args, training

from megatron_ft.cli.chaos.trace import TraceWriter, final_path
from megatron_ft.cli.demo import final_state
from megatron_ft.cli.demo.corruption import VARIABLE, corrupt
from megatron_ft.cli.demo.final_state import plain

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def install(directory: Path) -> None:
    """Wrap ``train_step`` and ``train`` of Megatron's loop to write into ``directory``."""
    training.train_step = _traced_step(training.train_step, directory)
    training.train = _traced_train(training.train, directory)


def _traced_step(step: Any, directory: Path) -> Any:
    traces: list[TraceWriter] = []
    signature = inspect.signature(step)

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not traces:  # ranks are known only now
            traces.append(TraceWriter(directory, torch.distributed.get_rank()))
            GPTDataset.__getitem__ = _observed(GPTDataset.__getitem__, traces[0])
        traces[0].begin()
        started = time.perf_counter()
        result = step(*args, **kwargs)
        loss = result[0].get("lm loss")
        value = None if loss is None else float(loss)
        iteration = get_args().curr_iteration + 1
        traces[0].record(iteration, value, started)
        if VARIABLE in os.environ:
            corrupt(signature.bind(*args, **kwargs).arguments["model"], iteration)
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
        path = final_path(directory, torch.distributed.get_rank())
        try:
            result = train(*args, **kwargs)
        except SystemExit:  # how --exit-interval leaves, with the state of an iteration's end
            final_state.write(path, collect(*live))
            raise
        final_state.write(path, collect(*live))
        return result

    return traced


def collect(model: list[Any], optimizer: Any, opt_param_scheduler: Any) -> dict[str, Any]:
    args, tracker = get_args(), tensor_parallel.get_cuda_rng_tracker()
    # A run that was restored in its last iteration has begun no other.
    done = max(getattr(args, "curr_iteration", -1) + 1, args.iteration)
    return {
        "iteration": done,
        "device": str(next(model[0].parameters()).device),
        "weights": _weights(model),
        "optimizers": _optimizers(optimizer),
        "random": final_state.random_states(torch.cuda.get_rng_state(), tracker.get_states()),
        "scheduler": plain(opt_param_scheduler.state_dict()),
        "counters": {name: getattr(args, name) for name in COUNTERS},
    }


def _weights(model: list[Any]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(model):
        for kind in (chunk.module.named_parameters(), chunk.module.named_buffers()):
            weights.update({f"chunk{number}.{name}": plain(tensor) for name, tensor in kind})
    return weights


def _optimizers(optimizer: Any) -> list[dict[str, Any]]:
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner, scaler = part.optimizer, getattr(part, "grad_scaler", None)
        if inner is None:  # a pipeline stage without such parameters
            continue
        groups = inner.param_groups
        parameters = [p for group in groups for p in group["params"]]
        found.append(
            {
                "main": plain(parameters),
                "state": [plain(inner.state[p]) for p in parameters],
                "groups": [plain({k: v for k, v in g.items() if k != "params"}) for g in groups],
                "grad_scaler": plain(scaler.state_dict()) if scaler else None,
            }
        )
    return found
