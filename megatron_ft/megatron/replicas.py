"""Which ranks hold the same of an optimizer's state."""

from __future__ import annotations

from typing import Any

from megatron_ft.megatron.optimizer import Master


def replica_group(master: Master, args: Any) -> Any:
    """The process group whose ranks hold the same master and moments, None if no other does.

    That is the whole data-parallel group with context parallelism, for experts theirs.
    With the distributed optimizer every rank owns a part, and the ranks with the same place
    in its other instances, if there are any, hold that part too.
    """
    from megatron.core import mpu

    if master.distributed:
        if getattr(args, "num_distributed_optimizer_instances", 1) == 1:
            return None
        return mpu.get_inter_distributed_optimizer_instance_group()
    if getattr(master.parameter, "allreduce", True):
        return mpu.get_data_parallel_group(with_context_parallel=True)
    return mpu.get_expert_data_parallel_group()
