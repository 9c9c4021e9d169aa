"""Names of parameters that are the same on every rank that holds a part of them, and only there."""

from __future__ import annotations

import re
from typing import Any

_EXPERT = re.compile(r"(\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)")


class ParameterNames:
    """Global names of an engine's parameters and buffers.

    DeepSpeed's own names, but an expert has its number in the whole layer (as in DeepSpeed's
    expert files), and under tensor parallelism the rank comes first, as each holds another
    part: ``mp_rank_01.layers.0.weight``.
    """

    def __init__(self, engine: Any) -> None:
        self._prefix = _tensor_parallel_prefix(engine)
        self._first_experts = _first_experts(engine.module)

    def of(self, name: str) -> str:
        """The global name of what is called ``name`` in ``engine.module``."""
        layer = _EXPERT.search(name)
        if layer is not None:
            number = self._first_experts.get(name[: layer.start()], 0) + int(layer.group(2))
            name = f"{name[: layer.start(2)]}{number}{name[layer.end(2) :]}"
        return self._prefix + name


def _tensor_parallel_prefix(engine: Any) -> str:
    if engine.mp_world_size <= 1:
        return ""
    # In a pipeline the model-parallel rank counts stages too; names tell those apart already.
    mpu = engine.mpu
    rank = getattr(mpu, "get_slice_parallel_rank", mpu.get_model_parallel_rank)()
    size = getattr(mpu, "get_slice_parallel_world_size", mpu.get_model_parallel_world_size)()
    return f"mp_rank_{rank:02d}." if size > 1 else ""


def _first_experts(module: Any) -> dict[str, int]:
    """By the name of each of DeepSpeed's MoE layers the number of this rank's first expert."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    return {
        name: groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
        for name, layer in module.named_modules()
        if isinstance(layer, MoE)
    }
