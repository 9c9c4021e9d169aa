"""ZeRO-3 (``DeepSpeedZeroOptimizer_Stage3``), in any precision, offloaded to the host or not.

Each rank has a partition of every parameter.  The partitions of some parameters are one flat
tensor, a sub-group, with one master; ``param_groups`` of the inner optimizer are empty between
steps.  Small parameters persist: every rank keeps them whole beside its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.optimizers.scalars import load_wrapper_scalars, wrapper_scalars
from deepspeed_ext.optimizers.view import Master, Weight, round_masters


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
