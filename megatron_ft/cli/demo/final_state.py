"""The complete training state of one rank as plain values, for comparison with an oracle.

Written independently of the snapshot code on purpose: it takes *everything*, weights that
a snapshot would derive included, so that a comparison finds what a snapshot forgot.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

COUNTERS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
)


def plain(value: Any) -> Any:
    """A copy in which everything is a host tensor, a container, a number, a text or a repr."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)


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


def _random_states() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    return {
        "python": plain(random.getstate()),
        "numpy": plain(np.random.get_state()),
        "torch": plain(torch.get_rng_state()),
        "device": plain(torch.cuda.get_rng_state()),
        "tracker": plain(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def collect(
    model: list[Any], optimizer: Any, opt_param_scheduler: Any, iteration: int
) -> dict[str, Any]:
    """Everything, copied: weights and buffers, optimizers, random states, schedule, counters.

    Tensors are on the host and detached; anything that is neither tensor, number nor text
    is its ``repr``, so the file loads with ``torch.load(..., weights_only=True)``.
    """
    from megatron.training import get_args

    args = get_args()
    return {
        "iteration": iteration,
        "weights": _weights(model),
        "optimizers": _optimizers(optimizer),
        "random": _random_states(),
        "scheduler": plain(opt_param_scheduler.state_dict()),
        "counters": {name: getattr(args, name) for name in COUNTERS},
    }


def write(path: Path, state: dict[str, Any]) -> None:
    """Save ``state`` under ``path``; a reader never sees half of it."""
    half = path.with_name(path.name + ".half")
    torch.save(state, half)
    os.replace(half, path)


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Paths at which two collected states differ in type, shape, keys or any bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        same = same and torch.equal(_bits(left), _bits(right))
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [d for k in left for d in differences(left[k], right[k], f"{where}/{k}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, f"{where}/{n}")]
    return [] if type(left) is type(right) and left == right else [where]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, because NaN differs from itself and -0.0 equals 0.0.
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)
