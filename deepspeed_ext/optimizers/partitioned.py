"""What ZeRO-1, ZeRO-2 and BF16_Optimizer have in common.

Each parameter group is one flat tensor of low-precision weights on every rank, cut in equal,
padded partitions, one a rank of the group's process group; the rank's fp32 master of its
partition is what the inner optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from deepspeed_ext.optimizers.groups import group_names
from deepspeed_ext.optimizers.view import Master, Weight, round_masters


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
