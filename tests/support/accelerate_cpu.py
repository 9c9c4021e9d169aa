"""Accelerate with FSDP2 on a CPU."""

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
