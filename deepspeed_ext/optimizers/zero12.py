"""ZeRO-1 and ZeRO-2 (``DeepSpeedZeroOptimizer``), in any precision, offloaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.partitioned import PartitionedView
from deepspeed_ext.optimizers.scalars import load_wrapper_scalars, wrapper_scalars


class Zero12View(PartitionedView):
    """Implements OptimizerView."""

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        super().__init__(
            wrapper,
            parameters=wrapper.bit16_groups,
            flats=wrapper.bit16_groups_flat,
            partitions=wrapper.parallel_partitioned_bit16_groups,
            masters=wrapper.single_partition_of_fp32_groups,
        )

    def scalars(self) -> dict[str, Any]:
        """Loss scaler, overflow and clipping."""
        return wrapper_scalars(self._wrapper, self._wrapper.loss_scaler)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set what ``scalars`` gave."""
        load_wrapper_scalars(self._wrapper, self._wrapper.loss_scaler, scalars)
