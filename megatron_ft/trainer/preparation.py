"""What a rank settles before its first capture: the room in its arena, and who copies there."""

from __future__ import annotations

from typing import Any

from megatron_ft.arena import digest
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.shard import ShardLayout
from megatron_ft.core.shard_meta import pack_meta
from megatron_ft.trainer.copier import Copier
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.state import TrainingState, live_tensors

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
    """The copier for where the tensors are; a CUDA one also takes host tensors.

    ConfigError if they are on several devices: copies wait for one of them alone.
    """
    live = live_tensors(state)
    devices = {tensor.get_device(): name for name, tensor in live.items() if tensor.is_cuda}
    if not devices:
        return CpuCopier(piece_bytes)
    if len(devices) > 1:
        places = ", ".join(f"{name} on cuda:{device}" for device, name in sorted(devices.items()))
        raise ConfigError(
            f"the tensors of one rank are on {len(devices)} devices ({places}): snapshots are "
            "taken of one device a rank; start one rank for each"
        )
    from megatron_ft.trainer.cuda import CudaCopier

    return CudaCopier(piece_bytes, *devices)
