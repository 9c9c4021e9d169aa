"""The snapshot manager of one rank of a DeepSpeed job.

This rank's place in DeepSpeed's parallel groups: the shard's name, and which ranks are peers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import shard_id
from megatron_ft.trainer.manager import SnapshotManager

_PIPELINE_RANK = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank")
_TENSOR_RANK = (
    "get_tensor_model_parallel_rank",
    "get_slice_parallel_rank",
    "get_model_parallel_rank",
)
"""What an mpu may call its ranks, best first: Megatron's, DeepSpeed's, and the old ones."""


def place_of(engine: Any) -> dict[str, Any]:
    """This rank's place, as keywords of SnapshotManager.  Collective over all ranks.

    The data-parallel rank is that in the group over which ZeRO partitions, sequence-parallel
    ranks included, so that pipeline, tensor and data-parallel rank name a rank uniquely.
    ``coordinates`` leave out the data-parallel one: ranks that agree in them hold partitions
    of one size, which DeepSpeed pads to be equal.  They keep the experts' one, so that a
    stripe is made of one expert-data-parallel group where the nodes allow it.
    Raises ConfigError if the job's mpu gives two ranks one place.
    """
    from torch import distributed

    pp = mpu_rank(engine.mpu, _PIPELINE_RANK)
    tp = mpu_rank(engine.mpu, _TENSOR_RANK)
    dp = distributed.get_rank(engine.seq_data_parallel_group)
    ep = distributed.get_rank(group) if (group := _largest_expert_group(engine)) else 0
    name = shard_id(pp=pp, tp=tp, dp=dp, ep=ep)
    names: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(names, name)
    check_unique(names)
    return {
        "shard_id": name,
        "rank": distributed.get_rank(),
        "world_size": distributed.get_world_size(),
        "coordinates": (pp, tp, ep),
    }


def mpu_rank(mpu: Any, names: Sequence[str]) -> int:
    """What the first of the methods that an mpu has returns; 0 without an mpu or a method."""
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return int(method())
    return 0


def check_unique(names: Sequence[str]) -> None:
    """Raise ConfigError that names the first two ranks with one shard id."""
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name in first:
            raise ConfigError(
                f"ranks {first[name]} and {rank} are both {name}: the mpu given to "
                "deepspeed.initialize reports one place for both. Each rank needs a pipeline, "
                "tensor and data-parallel rank of its own "
                f"({', '.join((*_PIPELINE_RANK, *_TENSOR_RANK))}, get_data_parallel_group)"
            )
        first[name] = rank


def _largest_expert_group(engine: Any) -> Any:
    """The expert-parallel group of most ranks that this rank is in, None without experts."""
    from torch import distributed

    groups: Mapping[str, Any] = getattr(engine, "expert_parallel_group", None) or {}
    if not engine.has_moe_layers or not groups:
        return None
    return max(groups.values(), key=distributed.get_world_size)


_owner: list[weakref.ref[Any]] = []


def claim(engine: Any) -> None:
    """Have the snapshots of this process be those of ``engine``; ConfigError if they are another's.

    Also of one that is gone: the shards of both would have one name, and the next incarnation would
    restore the one from the other's.
    """
    _owner[:] = _owner or [weakref.ref(engine)]
    if _owner[0]() is not engine:
        raise ConfigError(
            "this process has taken snapshots of another engine, and a job can have those of one "
            'only: leave "inmem_snapshot" out of the config of every engine but one'
        )


def make_manager(config: SnapshotConfig, engine: Any) -> SnapshotManager:
    """The manager of this rank, named by its place in DeepSpeed's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return SnapshotManager(config, **place_of(engine))
