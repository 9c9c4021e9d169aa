"""Accelerate with FSDP2 and with DeepSpeed on a CPU."""

from __future__ import annotations

from typing import Any


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Have an Accelerator heed its plugin, before ``prepare``.

    Accelerate 1.15 ignores it on a CPU without a word, and trains with DistributedDataParallel.
    All that it does with a plugin works there.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    assert not accelerator.is_fsdp2
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2


def join_on_cpu() -> None:
    """Have ranks of DeepSpeed be ranks of one job, before an Accelerator is made.

    Without a device Accelerate takes each for a job of its own.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    found = ("gloo", DistributedType.MULTI_CPU)
    PartialState._prepare_backend = lambda *_, **__: found
