"""What a rank settles before its first capture: the room in its arena, and who copies there."""

from __future__ import annotations

from typing import Any

from megatron_ft.arena import digest
from megatron_ft.capture.copier import Copier
from megatron_ft.capture.cpu import CpuCopier
from megatron_ft.capture.state import TrainingState, live_tensors
from megatron_ft.shard import ShardLayout
from megatron_ft.shard_meta import pack_meta

META_SPARE_BYTES = 65536
"""Room for small objects to grow beyond twice their first size."""

PLANNING_BLOCK_BYTES = 65536
"""The digest table is planned for blocks of this size, the shortest that releases gave to arenas;
longer ones need less."""


def required_bytes(layout: ShardLayout, objects: dict[str, Any], form: bytes) -> int:
    """Bytes of a data slot for this layout, with room for its small objects to grow.

    UnencodableError names an object that cannot be stored.
    """
    meta = pack_meta(layout.to_bytes(), objects, form)
    capacity = 2 * len(meta) + META_SPARE_BYTES
    return digest.required_bytes(layout.tensor_bytes, capacity, PLANNING_BLOCK_BYTES)


def choose_copier(state: TrainingState, piece_bytes: int) -> Copier:
    """The copier for where most tensors are; a CUDA one also takes host tensors."""
    if any(tensor.is_cuda for tensor in live_tensors(state).values()):
        from megatron_ft.capture.cuda import CudaCopier

        return CudaCopier(piece_bytes)
    return CpuCopier(piece_bytes)
