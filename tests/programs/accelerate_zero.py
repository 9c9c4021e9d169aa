"""The example of Accelerate with DeepSpeed, on a CPU; the environment has the ZeRO stage."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from typing import Any

import numpy

from megatron_ft import run_resilient
from megatron_ft.core.environment import JOB
from tests.programs.accelerate_fsdp2 import load
from tests.support.accelerate_cpu import join_on_cpu

STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
"""Accelerate's own name of the variable."""


def with_engine(kind: Callable[..., Any], **given: Any) -> Any:
    """An Accelerator whose engine asks for snapshots where there is a supervisor."""
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    if JOB in os.environ:
        plugin.deepspeed_config["inmem_snapshot"] = {"enabled": True}
    return kind(deepspeed_plugin=plugin, kwargs_handlers=given["kwargs_handlers"])


def state_hash(accelerator: Any, seen: Any) -> str:
    """SHA-256 of all that the ranks hold, but for what depends on nodes and snapshots."""
    import torch
    from torch.utils._pytree import tree_leaves

    from tests.support.deepspeed_final import collect

    (engine,) = accelerator._models
    zero_padding(engine)
    state = collect(engine)
    for name in ("config", "_curr_ckpt_path", "local_rank"):
        state["engine"].pop(name, None)
    schedules = [schedule.state_dict() for schedule in accelerator._schedulers]
    rest = [schedules, seen.samples, accelerator.step]
    digest = hashlib.sha256()
    for leaf in tree_leaves([state, rest]):
        is_tensor = isinstance(leaf, torch.Tensor)
        # The text of a list of numbers has all their bits.
        digest.update(repr(leaf.tolist() if is_tensor else leaf).encode())
    every: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(every, digest.hexdigest())
    return hashlib.sha256("".join(every).encode()).hexdigest()


def zero_padding(engine: Any) -> None:
    """Zero what fills up the last rank's partitions: ZeRO 3 takes any memory for it."""
    import torch

    wrapper, last = engine.optimizer, engine.global_rank == engine.world_size - 1
    if not last or not hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return
    with torch.no_grad():
        for group, masters in zip(
            wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True
        ):
            end = 0
            for parameter in group:
                end, padding = end + parameter.partition_numel(), parameter.padding_size()
                masters[end - padding : end] = 0
                parameter.ds_tensor.view(-1)[parameter.partition_numel() - padding :] = 0


def main() -> None:
    """Train as the example does, but for the class that takes the snapshots."""
    from deepspeed_ext import InMemoryState

    join_on_cpu()
    # The example seeds torch alone.
    random.seed(1)
    numpy.random.seed(1)
    module = load(with_engine)
    module.InMemoryState, module.state_hash = InMemoryState, state_hash
    module.main()


if __name__ == "__main__":
    run_resilient(main)
