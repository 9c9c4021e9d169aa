"""Without ZeRO: every data-parallel rank has all masters and moments, equal to the others'.

They are declared replicated, so each rank captures a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from deepspeed_ext.optimizers.view import (
    MASTER,
    OptimizerView,
    OwnedMaster,
    group_names,
)
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.master_tensors import Weight, create_state, parameters, state_tensors


class PlainView(OptimizerView):
    """An optimizer of torch itself: weights are their own masters, and loss is not scaled."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._read_names()

    def _read_names(self) -> None:
        named = self._engine.module.named_parameters()
        self._names = {id(parameter): name for name, parameter in named}

    @property
    def inner(self) -> Any:
        return self._wrapper

    def masters(self) -> Sequence[OwnedMaster]:
        """One a parameter that is trained, or was before it was frozen."""
        self._read_names()
        return [self._master(group, parameter, parameter) for group, parameter in self._trained()]

    def _trained(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        kept = self.inner.state
        for group, parameter in parameters(self.inner):
            if parameter.requires_grad or kept.get(parameter):
                yield group, parameter

    def _master(
        self, group: dict[str, Any], parameter: torch.Tensor, master: torch.Tensor
    ) -> OwnedMaster:
        name = f"optimizer/{self._name(parameter)}"
        replicas = replica_group(self._engine, parameter)
        return OwnedMaster(name, self.inner, group, master, replicas)

    def _name(self, parameter: torch.Tensor) -> str:
        name: str | None = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in "
                "the model, so it has no name in a snapshot: make it one of the model's (a loss "
                "with weights can be a submodule), or train without snapshots"
            )
        return name

    def weights(self) -> Sequence[Weight]:
        return []

    def owned(self) -> Iterable[torch.Tensor]:
        """Those that have masters; ConfigError for one that is not in the model."""
        owned = [parameter for _, parameter in self._trained()]
        if not self._names.keys() >= set(map(id, owned)):
            self._read_names()
            for parameter in owned:
                self._name(parameter)
        return owned

    def adopt(self, name: str, stored: torch.Tensor) -> bool:
        """Take the state of a parameter that is frozen here, and was trained in the snapshot."""
        found = self._find(name)
        if found is None:
            return False
        group, parameter = found
        create_state(self.inner, group, parameter)
        own = {MASTER: parameter, **state_tensors(self.inner, parameter)}
        tensor = own.get(name.rpartition("/")[2])
        if tensor is None or tensor.shape != stored.shape or tensor.dtype != stored.dtype:
            return False
        tensor.detach().copy_(stored)
        return True

    def replica_group(self, name: str) -> Any:
        found = self._find(name)
        return None if found is None else replica_group(self._engine, found[1])

    def _find(self, name: str) -> tuple[dict[str, Any], torch.Tensor] | None:
        """The parameter whose master, or a part of its state, has this name."""
        owner = name.rpartition("/")[0]
        every = parameters(self.inner)
        return next((one for one in every if owner == f"optimizer/{self._name(one[1])}"), None)

    def scalars(self) -> dict[str, Any]:
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set nothing."""


class _WrapperView(PlainView):
    """A wrapper that keeps fp32 masters of low-precision weights; each rank rounds all of them."""

    @property
    def inner(self) -> Any:
        return self._wrapper.optimizer

    def owned(self) -> Iterable[torch.Tensor]:
        return [parameter for group in self._wrapper.fp16_groups for parameter in group]

    def scaler(self) -> Any:
        """FP16 wrappers have one, bf16 ones do not."""
        return getattr(self._wrapper, "loss_scale_config", None)

    adopt = OptimizerView.adopt
    replica_group = OptimizerView.replica_group
    scalars = OptimizerView.scalars
    load_scalars = OptimizerView.load_scalars


class UnfusedView(_WrapperView):
    """``FP16_UnfusedOptimizer``, of bf16 too: a master for each parameter."""

    def masters(self) -> Sequence[OwnedMaster]:
        return [
            self._master(group, parameter, master) for group, parameter, master in self._pairs()
        ]

    def weights(self) -> Sequence[Weight]:
        return [
            Weight(
                f"weight/{self._name(parameter)}",
                parameter.detach(),
                master.detach(),
                replica_group(self._engine, parameter),
            )
            for _, parameter, master in self._pairs()
        ]

    def _pairs(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        groups, wrapper = self.inner.param_groups, self._wrapper
        found = zip(groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for group, weights, masters in found:
            for parameter, master in zip(weights, masters, strict=True):
                yield group, parameter, master


class FusedView(_WrapperView):
    """``FP16_Optimizer``, of bf16 too: one flat master for each parameter group."""

    def masters(self) -> Sequence[OwnedMaster]:
        groups, flats = self.inner.param_groups, self._wrapper.fp32_groups_flat
        return [
            OwnedMaster(f"optimizer/{name}", self.inner, group, flat, replicas)
            for name, flat, group, replicas in zip(
                group_names(groups), flats, groups, self._replicas(), strict=True
            )
        ]

    def weights(self) -> Sequence[Weight]:
        names, wrapper = group_names(self.inner.param_groups), self._wrapper
        pairs = zip(wrapper.fp16_groups_flat, wrapper.fp32_groups_flat, strict=True)
        return [
            Weight(f"weight/{name}", flat.detach(), master.detach(), replicas)
            for name, (flat, master), replicas in zip(names, pairs, self._replicas(), strict=True)
        ]

    def _replicas(self) -> list[Any]:
        return [replica_group(self._engine, group[0]) for group in self._wrapper.fp16_groups]


def replica_group(engine: Any, parameter: torch.Tensor) -> Any:
    """The ranks that hold the same of a parameter's state; None if no other does.

    Those of the data-parallel group, for an expert of its own.
    """
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    group = engine.seq_data_parallel_group
    if is_moe_param(parameter):
        name: Any = parameter
        group = groups._get_expert_data_parallel_group(name.group_name)
    return group if distributed.get_world_size(group) > 1 else None
