"""ZeRO's optimizers: each rank holds a partition of masters and moments.

ZeRO-1, ZeRO-2 and ``BF16_Optimizer`` make one flat tensor of the low-precision weights of a
parameter group.  It is cut in equal, padded partitions, one a rank of the group's process group;
the rank's fp32 master of its partition is what the inner optimizer updates.

ZeRO-3 partitions every parameter.  The partitions of some parameters are one flat tensor, a
sub-group, with one master; ``param_groups`` of the inner optimizer are empty between steps.  Small
parameters persist: every rank keeps them whole beside its partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from deepspeed_ext.optimizers.view import OptimizerView, OwnedMaster, group_names
from megatron_ft.core.frameworks import Function
from megatron_ft.trainer.master_tensors import Weight

log = logging.getLogger(__name__)


class Zero12View(OptimizerView):
    """``DeepSpeedZeroOptimizer`` (ZeRO-1 and 2), in any precision, offloaded or not.

    The wrapper keeps four lists by parameter group: the model's parameters, all weights flat,
    these cut by rank, and the masters of this rank.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._parameters, self._flats, self._partitions, self._masters = self._lists()

    def _lists(self) -> tuple[Any, Any, Any, Any]:
        wrapper = self._wrapper
        partitions = wrapper.parallel_partitioned_bit16_groups
        masters = wrapper.single_partition_of_fp32_groups
        return wrapper.bit16_groups, wrapper.bit16_groups_flat, partitions, masters

    def masters(self) -> Sequence[OwnedMaster]:
        """One a parameter group: this rank's partition, padding included."""
        groups = self.inner.param_groups
        found = zip(group_names(groups), self._masters, groups, strict=True)
        return [
            OwnedMaster(f"optimizer/{name}", self.inner, group, master)
            for name, master, group in found
        ]

    def weights(self) -> Sequence[Weight]:
        """One a parameter group: the partition of this rank, of which the master is here."""
        names = group_names(self.inner.param_groups)
        groups = self._wrapper.real_dp_process_group
        found = zip(names, self._partitions, self._masters, groups, strict=True)
        return [
            Weight(f"weight/{name}", parts[distributed.get_rank(group)].detach(), master.detach())
            for name, parts, master, group in found
        ]

    def derived(self) -> Iterable[torch.Tensor]:
        """All flat weights: those of other ranks are gathered."""
        return list(self._flats)

    def owned(self) -> Iterable[torch.Tensor]:
        return [parameter for group in self._parameters for parameter in group]

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Round this rank's masters, and exchange partitions with the others."""
        from deepspeed.runtime.utils import all_gather_dp_groups

        super().publish(kept)
        all_gather_dp_groups(
            groups_flat=self._flats,
            partitioned_param_groups=self._partitions,
            dp_process_group=self._wrapper.real_dp_process_group,
            start_alignment_factor=self._wrapper.nccl_start_alignment_factor,
            allgather_bucket_size=self._wrapper.allgather_bucket_size,
        )

    def before_training(self) -> Any:
        """Install OldGradients where the optimizer is offloaded."""
        offloads = getattr(self._wrapper, "cpu_offload", False)
        return OldGradients(self._engine) if offloads else None


class OldGradients:
    """Zeroes old gradients: a weight without a gradient in this step gets none.

    DeepSpeed alone would apply an earlier one again.

    With ``offload_optimizer`` it keeps gradients in host memory from step to step: no restart has
    those of before, and without offload it applies none either.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._wrapper = engine, engine.optimizer
        self._came: dict[int, int] = {}
        self._warned = False
        self._wrapper.optimizer.register_step_pre_hook(self._before_step)
        original = self._wrapper.async_accumulate_grad_in_cpu_via_gpu
        self._wrapper.async_accumulate_grad_in_cpu_via_gpu = partial(self._accumulate, original)

    def _before_step(self, *_: Any) -> None:
        wrapper = self._wrapper
        # The norms are those of this step's gradients, of weights in this rank's partition.
        missing = wrapper.grad_position.keys() - wrapper.norm_for_param_grads.keys()
        for number in missing:
            group, _, begin, size = wrapper.grad_position[number]
            flat = wrapper.single_partition_of_fp32_groups[group].grad.view(-1)
            flat.narrow(0, begin, size).zero_()
        if missing and not self._warned:
            self._warned = True
            log.warning(
                "%d weights had no gradient in step %d and get none; with offload_optimizer "
                "DeepSpeed alone would apply the one of an earlier step again",
                len(missing),
                self._engine.global_steps + 1,
            )

    def _accumulate(self, original: Function, parameter: torch.Tensor) -> None:
        """Add a micro-batch's gradient to those of this step, not to those of an earlier one."""
        wrapper, step = self._wrapper, self._engine.global_steps
        number = wrapper.get_param_id(parameter)
        kept = wrapper.accumulated_grads_in_cpu.get(number)
        if wrapper.micro_step_id > 0 and kept is not None and self._came.get(number) != step:
            kept.zero_()
        self._came[number] = step
        original(parameter)


class Bf16View(Zero12View):
    """``BF16_Optimizer``: bf16 weights with fp32 gradient accumulation, and no loss scale."""

    def _lists(self) -> tuple[Any, Any, Any, Any]:
        wrapper = self._wrapper
        partitions, masters = wrapper.bf16_partitioned_groups, wrapper.fp32_groups_flat_partition
        return wrapper.bf16_groups, wrapper.bf16_groups_flat, partitions, masters

    def scaler(self) -> Any:
        return None


class Zero3View(OptimizerView):
    """``DeepSpeedZeroOptimizer_Stage3``, in any precision, offloaded to the host or not."""

    def masters(self) -> Sequence[OwnedMaster]:
        """One a sub-group: this rank's partitions, padding included."""
        groups, group_of = self.inner.param_groups, self._wrapper.sub_group_to_group_id
        return [
            OwnedMaster(f"optimizer/{n}", self.inner, groups[group_of[n]], master)
            for n, master in enumerate(self._wrapper.fp32_partitioned_groups_flat)
        ]

    def counted_as(self, master: OwnedMaster) -> str:
        """The parameter group's: the sub-groups of other numbers of ranks are others."""
        groups = self.inner.param_groups
        number = next(n for n, group in enumerate(groups) if group is master.group)
        return f"optimizer/{group_names(groups)[number]}"

    def weights(self) -> Sequence[Weight]:
        """One a sub-group; none where the optimizer updates the weights themselves, in fp32."""
        masters = self._wrapper.fp32_partitioned_groups_flat
        pairs = enumerate(zip(self._wrapper.fp16_partitioned_groups_flat, masters, strict=True))
        return [
            Weight(f"weight/{number}", flat.detach(), master.detach())
            for number, (flat, master) in pairs
            if flat.data_ptr() != master.data_ptr()
        ]

    def derived(self) -> Iterable[torch.Tensor]:
        """The sub-groups, and parameters that are whole now: these are gathered anew."""
        whole = (p for p in self._wrapper.module.parameters() if hasattr(p, "ds_tensor"))
        return [*super().derived(), *(p.detach() for p in whole if p.numel())]

    def owned(self) -> Iterable[torch.Tensor]:
        return [parameter for group in self._wrapper.fp16_groups for parameter in group]

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Round this rank's masters, and gather what persists, frozen parameters included."""
        # Parameters gathered before are given up, else they would stay as they were.
        self._wrapper.checkpoint_event_prologue()
        # The epilogue does this for trainable parameters; frozen ones never change else.
        for parameter in self._wrapper.module.parameters():
            parameter.ds_secondary_tensor = None
        super().publish(kept)
        self._wrapper.checkpoint_event_epilogue()
