"""``BF16_Optimizer``: bf16 weights with fp32 gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.partitioned import PartitionedView
from deepspeed_ext.optimizers.scalars import load_wrapper_scalars, wrapper_scalars


class Bf16View(PartitionedView):
    """Implements OptimizerView."""

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        super().__init__(
            wrapper,
            parameters=wrapper.bf16_groups,
            flats=wrapper.bf16_groups_flat,
            partitions=wrapper.bf16_partitioned_groups,
            masters=wrapper.fp32_groups_flat_partition,
        )

    def scalars(self) -> dict[str, Any]:
        """Overflow and clipping; there is no loss scale."""
        return wrapper_scalars(self._wrapper, None)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set what ``scalars`` gave."""
        load_wrapper_scalars(self._wrapper, None, scalars)
