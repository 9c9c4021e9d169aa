"""What ZeRO-1, ZeRO-2 and BF16_Optimizer have in common.

Each parameter group is one flat tensor of low-precision weights on every rank, cut in equal,
padded partitions, one a rank of the group's process group; the rank's fp32 master of its
partition is what the inner optimizer updates.

``BF16_Optimizer``: bf16 weights with fp32 gradient accumulation.

ZeRO-1 and ZeRO-2 (``DeepSpeedZeroOptimizer``), in any precision, offloaded or not.

ZeRO-3 (``DeepSpeedZeroOptimizer_Stage3``), in any precision, offloaded to the host or not.

Each rank has a partition of every parameter.  The partitions of some parameters are one flat
tensor, a sub-group, with one master; ``param_groups`` of the inner optimizer are empty between
steps.  Small parameters persist: every rank keeps them whole beside its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from deepspeed_ext.optimizers.view import (
    Master,
    Weight,
    group_names,
    load_wrapper_scalars,
    round_masters,
    wrapper_scalars,
)


class PartitionedView:
    """A view of a wrapper through the lists, by parameter group, that it keeps.

    ``parameters``: the model's; ``flats``: all weights; ``partitions``: these cut by rank;
    ``masters``: this rank's.
    """

    def __init__(
        self,
        wrapper: Any,
        parameters: Sequence[Sequence[torch.Tensor]],
        flats: Sequence[torch.Tensor],
        partitions: Sequence[Sequence[torch.Tensor]],
        masters: Sequence[torch.Tensor],
    ) -> None:
        self._wrapper = wrapper
        self._parameters = parameters
        self._flats = flats
        self._partitions = partitions
        self._masters = masters

    def inner(self) -> Sequence[Any]:
        """The one inner optimizer."""
        return [self._wrapper.optimizer]

    def masters(self) -> Sequence[Master]:
        """One a parameter group: this rank's partition, padding included."""
        inner = self._wrapper.optimizer
        found = zip(self._names(), self._masters, inner.param_groups, strict=True)
        return [Master(f"optimizer/{name}", inner, group, master) for name, master, group in found]

    def _names(self) -> list[str]:
        return group_names(self._wrapper.optimizer.param_groups)

    def weights(self) -> Sequence[Weight]:
        """One a parameter group: the partition of this rank, of which the master is here."""
        groups = self._wrapper.real_dp_process_group
        found = zip(self._names(), self._partitions, self._masters, groups, strict=True)
        return [
            Weight(f"weight/{name}", parts[distributed.get_rank(group)].detach(), master.detach())
            for name, parts, master, group in found
        ]

    def owned(self) -> Iterable[torch.Tensor]:
        """The parameters that are flattened."""
        return [parameter for group in self._parameters for parameter in group]

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Round this rank's masters, and exchange partitions with the others."""
        from deepspeed.runtime.utils import all_gather_dp_groups

        round_masters(self.weights(), kept)
        all_gather_dp_groups(
            groups_flat=self._flats,
            partitioned_param_groups=self._partitions,
            dp_process_group=self._wrapper.real_dp_process_group,
            start_alignment_factor=self._wrapper.nccl_start_alignment_factor,
            allgather_bucket_size=self._wrapper.allgather_bucket_size,
        )


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


class Zero3View:
    """Implements OptimizerView."""

    def __init__(self, engine: Any) -> None:
        self._wrapper = engine.optimizer

    def inner(self) -> Sequence[Any]:
        """The one inner optimizer."""
        return [self._wrapper.optimizer]

    def masters(self) -> Sequence[Master]:
        """One a sub-group: this rank's partitions, padding included."""
        inner, group_of = self._wrapper.optimizer, self._wrapper.sub_group_to_group_id
        groups = inner.param_groups
        return [
            Master(f"optimizer/{n}", inner, groups[group_of[n]], master)
            for n, master in enumerate(self._wrapper.fp32_partitioned_groups_flat)
        ]

    def weights(self) -> Sequence[Weight]:
        """One a sub-group; none where the optimizer updates the weights themselves, in fp32."""
        masters = self._wrapper.fp32_partitioned_groups_flat
        pairs = enumerate(zip(self._wrapper.fp16_partitioned_groups_flat, masters, strict=True))
        return [
            Weight(f"weight/{number}", flat.detach(), master.detach())
            for number, (flat, master) in pairs
            if flat.data_ptr() != master.data_ptr()
        ]

    def owned(self) -> Iterable[torch.Tensor]:
        """The parameters that are in sub-groups."""
        return [parameter for group in self._wrapper.fp16_groups for parameter in group]

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Round this rank's masters, and gather what persists, frozen parameters included."""
        # What was gathered before is given up, else it would stay as it was.
        self._wrapper.checkpoint_event_prologue()
        self._forget_secondary()
        round_masters(self.weights(), kept)
        self._wrapper.checkpoint_event_epilogue()

    def _forget_secondary(self) -> None:
        # Those of trainable parameters the epilogue would do; frozen ones never change else.
        for parameter in self._wrapper.module.parameters():
            parameter.ds_secondary_tensor = None

    def scalars(self) -> dict[str, Any]:
        """Loss scaler, overflow and clipping."""
        return wrapper_scalars(self._wrapper, self._wrapper.loss_scaler)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set what ``scalars`` gave."""
        load_wrapper_scalars(self._wrapper, self._wrapper.loss_scaler, scalars)
