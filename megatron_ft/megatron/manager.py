"""The snapshot manager of one Megatron rank."""

from __future__ import annotations

from typing import Any

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import shard_id
from megatron_ft.megatron.fewer_ranks import rule_of
from megatron_ft.trainer.manager import SnapshotManager


def place_of_rank() -> dict[str, Any]:
    """This rank's place in Megatron's parallel groups, as keywords of SnapshotManager.

    Pipeline, tensor and data-parallel rank (context parallelism counts as data parallel)
    name a rank uniquely, with experts too.  ``coordinates`` leave out the data-parallel
    one and keep the experts', so that stripes are made of ranks with shards of one size.
    """
    import torch
    from megatron.core import mpu

    pp, tp = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    dp = mpu.get_data_parallel_rank(with_context_parallel=True)
    ep = mpu.get_expert_model_parallel_rank()
    return {
        "shard_id": shard_id(pp=pp, tp=tp, dp=dp, ep=ep),
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
        "coordinates": (pp, tp, ep),
    }


def make_manager(config: SnapshotConfig) -> SnapshotManager:
    """The manager of this rank, named by its place in Megatron's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return SnapshotManager(config, **place_of_rank(), rank_rule=rule_of(_arguments()))


def _arguments() -> Any:
    from megatron.training import get_args

    return get_args()
