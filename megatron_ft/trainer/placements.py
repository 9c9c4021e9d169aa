"""Places of DTensors in their whole, and of an optimizer's state on devices and meshes.

FSDP2 and tensor parallelism split a tensor along dimensions over a mesh of ranks, evenly or not, or
have the same on several ranks.

Nearly all state of an optimizer lies where torch puts it: on its parameter's device, sharded like
the parameter, ``step`` on the host.  Snapshots hold the exceptions, for what a load has to create.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import StateMismatchError
from megatron_ft.core.shard import LogicalPlace, Piece, row_major
from megatron_ft.trainer.addresses import DENSE, local_tensor
from megatron_ft.trainer.optimizer_load import parameters


class DTensorPlaces(NamedTuple):
    """Places by the names of tensors, and why DTensors that are not among them have none."""

    places: dict[str, LogicalPlace]
    problems: dict[str, str]


def dtensor_places(tensors: Mapping[str, torch.Tensor]) -> DTensorPlaces:
    """Places of the DTensors among ``tensors``; the name of each is that of the whole."""
    found = DTensorPlaces({}, {})
    for name, tensor in tensors.items():
        if type(tensor) in DENSE or not hasattr(tensor, "placements"):
            continue
        piece = _piece(name, tensor)
        if isinstance(piece, str):
            found.problems[name] = piece
        else:
            elements = int(torch.Size(piece.shape).numel())
            found.places[name] = LogicalPlace(0, elements, (piece,))
    return found


def _piece(name: str, tensor: Any) -> Piece | str:
    """The local shard of a DTensor as a piece of the whole, or the reason why it cannot be one."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    strange = [p for p in tensor.placements if type(p) not in (Replicate, Shard)]
    if strange:
        return f"it is placed as {strange[0]!r}, of which only Shard and Replicate are known"
    whole, local = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    placed = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(whole, *placed)
    if tuple(shape) != local:
        return f"its local shape is {list(local)}, by its placements {list(shape)}"
    return Piece(name, whole, tuple(map(int, offset)), local, 0, row_major(local))


class StatePlaces:
    """The places of one optimizer's state; ``name`` begins the names of its tensors."""

    def __init__(self, name: str, optimizer: Any) -> None:
        self._name, self._prefix = f"{name}/", f"{name}/state/"
        # Each parameter, and whether its optimizer keeps ``step`` on its device.
        self._owners = {
            str(number): (parameter, bool(group.get("capturable") or group.get("fused")))
            for number, (group, parameter) in enumerate(
                (group, parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
        }
        meshes = (one.device_mesh for one in parameters(optimizer) if hasattr(one, "device_mesh"))
        self._mesh = next(meshes, None)

    def exceptions(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
        """Device type and placement, by name, of tensors that lie elsewhere than usual."""
        found = {}
        for name, tensor in tensors.items():
            if name.startswith(self._name):
                local = local_tensor(tensor)
                here = [local.device.type, _placement(tensor)]
                device, placement, _ = self._usual(name, local)
                if here != [device.type, placement]:
                    found[name] = here
        return found

    def placed(
        self, tensors: Mapping[str, torch.Tensor], exceptions: Mapping[str, list[Any]]
    ) -> dict[str, torch.Tensor]:
        """Stored tensors of this optimizer, where they lay."""
        found = {}
        for name, local in tensors.items():
            if name.startswith(self._name):
                device, usual, owner = self._usual(name, local)
                kind, placement = exceptions.get(name, [device.type, usual])
                made = local.to(device if device.type == kind else torch.device(kind))
                found[name] = (
                    made if placement is None else self._made(name, made, placement, owner)
                )
        return found

    def _usual(self, name: str, local: torch.Tensor) -> tuple[torch.device, Any, Any]:
        """The device and placement that torch gives it, and its parameter."""
        number, _, key = name.removeprefix(self._prefix).partition("/")
        known = self._owners.get(number) if name.startswith(self._prefix) else None
        owner, step_on_device = known or (None, False)
        if owner is None or (key == "step" and not step_on_device):
            return torch.device("cpu"), None, owner
        whole = local_tensor(owner)
        like = whole is not owner and local.dim() and local.shape == whole.shape
        return whole.device, _placement(owner) if like else None, owner

    def _made(self, name: str, local: torch.Tensor, placement: Any, owner: Any) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        if owner is not None and placement == _placement(owner):
            kinds, mesh = owner.placements, owner.device_mesh
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
