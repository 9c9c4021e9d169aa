"""The complete training state of one rank of DeepSpeed, for comparison with an oracle.

Written independently of the snapshot code on purpose, like megatron_ft.cli.demo.final_state:
it takes everything, also what a snapshot would derive.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron_ft.cli.demo.final_state import plain

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

# Lists of the flat fp32 partitions, by class of optimizer; where none of them is there, the inner
# optimizer's parameters are what it updates.
_FLAT_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
)


def collect(engine: Any) -> dict[str, Any]:
    """Everything, copied: weights and buffers, optimizer, random states, schedule, counters.

    Values are as those of final_state.collect.
    """
    scheduler = engine.lr_scheduler
    return {
        "weights": _weights(engine.module),
        "optimizer": _optimizer(engine.optimizer),
        "scheduler": None if scheduler is None else plain(scheduler.state_dict()),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "random": _random_states(),
    }


def _weights(module: Any) -> dict[str, torch.Tensor]:
    """Of a parameter that ZeRO-3 has cut up, this rank's part."""
    weights = {name: plain(getattr(p, "ds_tensor", p)) for name, p in module.named_parameters()}
    return {**weights, **{name: plain(buffer) for name, buffer in module.named_buffers()}}


def _optimizer(optimizer: Any) -> dict[str, Any]:
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = _masters(optimizer, inner)
    scaler = getattr(optimizer, "loss_scaler", None)
    groups = inner.param_groups
    return {
        "main": plain(masters),
        "state": [plain(dict(sorted(inner.state[master].items()))) for master in masters],
        "groups": [plain({k: v for k, v in g.items() if k != "params"}) for g in groups],
        "loss_scaler": plain(vars(scaler)) if hasattr(scaler, "__dict__") else plain(scaler),
        "overflow": plain(getattr(optimizer, "overflow", None)),
    }


def _masters(optimizer: Any, inner: Any) -> list[Any]:
    for name in _FLAT_MASTERS:
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _random_states() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    return {
        "python": plain(random.getstate()),
        "numpy": plain(np.random.get_state()),
        "torch": plain(torch.get_rng_state()),
        "device": plain(get_accelerator().get_rng_state()),
        "tracker": plain(get_cuda_rng_tracker().get_states()),
    }
