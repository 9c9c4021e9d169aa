"""Devices and DTensor placements of an optimizer's state, for state that a load has to create.

Nearly all state lies where torch puts it: on its parameter's device, sharded like the parameter,
``step`` on the host.  Snapshots hold the exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import StateMismatchError
from megatron_ft.trainer.optimizer_load import parameters


class _Owner(NamedTuple):
    """A parameter, and whether its optimizer keeps ``step`` on its device."""

    parameter: Any
    step_on_device: bool


class StatePlaces:
    """The places of one optimizer's state; ``name`` begins the names of its tensors."""

    def __init__(self, name: str, optimizer: Any) -> None:
        self._name, self._prefix = name, f"{name}/state/"
        numbered = (
            _Owner(parameter, bool(group.get("capturable") or group.get("fused")))
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        self._owners = {str(number): owner for number, owner in enumerate(numbered)}
        self._mesh = next(
            (p.device_mesh for p in parameters(optimizer) if hasattr(p, "device_mesh")), None
        )

    def exceptions(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
        """Device type and placement, by name, of tensors that lie elsewhere than usual."""
        found = {}
        for name, tensor in tensors.items():
            if not name.startswith(f"{self._name}/"):
                continue
            placed, local = _placement(tensor), getattr(tensor, "_local_tensor", tensor)
            usual = self._usual(name, local)
            if (local.device.type, placed) != (usual[0].type, usual[1]):
                found[name] = [local.device.type, placed]
        return found

    def placed(
        self, tensors: Mapping[str, torch.Tensor], exceptions: Mapping[str, list[Any]]
    ) -> dict[str, torch.Tensor]:
        """Stored tensors of this optimizer, where they lay."""
        found = {}
        for name, local in tensors.items():
            if not name.startswith(f"{self._name}/"):
                continue
            device, placement = self._usual(name, local)
            if name in exceptions:
                kind, placement = exceptions[name]
                device = device if device.type == kind else torch.device(kind)
            found[name] = self._made(name, local.to(device), placement)
        return found

    def _usual(self, name: str, local: torch.Tensor) -> tuple[torch.device, Any]:
        number, _, key = name.removeprefix(self._prefix).partition("/")
        owner = self._owners.get(number) if name.startswith(self._prefix) else None
        if owner is None or (key == "step" and not owner.step_on_device):
            return torch.device("cpu"), None
        whole = getattr(owner.parameter, "_local_tensor", owner.parameter)
        like = whole is not owner.parameter and local.dim() and local.shape == whole.shape
        return whole.device, _placement(owner.parameter) if like else None

    def _made(self, name: str, local: torch.Tensor, placement: Any) -> torch.Tensor:
        if placement is None:
            return local
        from torch.distributed.tensor import DTensor

        number = name.removeprefix(self._prefix).partition("/")[0]
        owner = self._owners.get(number)
        if owner is not None and placement == _placement(owner.parameter):
            kinds, mesh = owner.parameter.placements, owner.parameter.device_mesh
        else:
            kinds, mesh = _kinds(name, placement[0]), self._mesh
        shape, stride = torch.Size(placement[1]), tuple(placement[2])
        return DTensor.from_local(local, mesh, kinds, shape=shape, stride=stride)


def has_device() -> bool:
    """True if tensors can lie elsewhere than on the host."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _placement(tensor: Any) -> Any:
    """The placements, shape and stride of a DTensor as plain values; None of any other."""
    if not hasattr(tensor, "placements"):
        return None
    kinds = [repr(one) for one in tensor.placements]
    return [kinds, list(tensor.shape), list(tensor.stride())]


def _kinds(name: str, written: list[str]) -> list[Any]:
    """Placements from what ``repr`` gave: shards and replicas alone can be made anew."""
    from torch.distributed.tensor import Replicate, Shard

    known: dict[str, Any] = {repr(one): one for one in (Replicate(), *map(Shard, range(8)))}
    strange = [one for one in written if one not in known]
    if strange:
        raise StateMismatchError(
            f"{name} was placed as {strange[0]}, of which only Shard and Replicate can be made "
            "anew: create the optimizer's state before load()"
        )
    return [known[one] for one in written]
