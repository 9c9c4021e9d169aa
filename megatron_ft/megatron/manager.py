"""The snapshot manager of one Megatron rank."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_ft.capture.manager import SnapshotManager
from megatron_ft.capture.stats import CaptureStats
from megatron_ft.config import SnapshotConfig
from megatron_ft.identity import shard_id


class Manager(Protocol):
    """What a run asks of its manager; see capture.manager.SnapshotManager."""

    @property
    def stats(self) -> CaptureStats:
        """What snapshots have cost so far, and how safe they are."""

    @property
    def offered_iteration(self) -> int:
        """Of the snapshot that this rank was offered, -1 if none."""

    def offered_objects(self) -> dict[str, Any]:
        """What the offered snapshot holds beside tensors; {} if none was offered."""

    def decline(self) -> None:
        """Start without the offered snapshot, as all ranks do."""

    def load(self, into: Any) -> int:
        """Restore the offered snapshot in place; its iteration."""

    def prepare(self, state: Any) -> None:
        """Plan the layout and wait for the arena."""

    def save(self, iteration: int, state: Any) -> Any:
        """Say that an iteration has ended; captures it if the job permits."""

    def register_fence(self, optimizer: Any) -> Any:
        """Wait for a running capture before each of the optimizer's steps."""

    def close(self) -> None:
        """End captures and leave."""


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


def make_manager(config: SnapshotConfig) -> Manager:
    """The manager of this rank, named by its place in Megatron's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return SnapshotManager(config, **place_of_rank())
