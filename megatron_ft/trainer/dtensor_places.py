"""Places of DTensors in the tensors that they are shards of, as FSDP2 and tensor parallelism make
them: split along dimensions over a mesh of ranks, evenly or not, or the same on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_ft.core.shard import LogicalPlace, Piece, row_major
from megatron_ft.trainer.addresses import DENSE


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
    """The local shard of a DTensor as a piece of the whole, or why it is none."""
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
