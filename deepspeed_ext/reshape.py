"""Numbers of ranks that an engine works with, and small objects for a rank of another number.

The global batch stays what it is; micro-batches or steps of accumulation follow the number of
data-parallel ranks, as DeepSpeed derives them from ``train_batch_size``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_ext import resumable_loader
from deepspeed_ext.state_parts import BATCH
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.identity import RankRule

_TOTAL, _MICRO, _ACCUMULATION = BATCH


def rule_of(engine: Any) -> RankRule | None:
    """Numbers of ranks that the engine's JSON works with; None if it works with one alone."""
    if refusals(engine):
        return None
    config, replica = engine._config, engine.world_size // engine.dp_world_size
    experts = [layer.ep_size for layer in engine.module.modules() if hasattr(layer, "ep_size")]
    # The number that was not given follows from the others.
    given = [name for name in (_MICRO, _ACCUMULATION) if config._param_dict.get(name) is not None]
    fixed = math.prod(getattr(config, name) for name in given)
    return RankRule(replica * math.lcm(*experts), replica, getattr(config, _TOTAL) // fixed)


def refusals(engine: Any) -> list[str]:
    """The reasons why the engine's JSON works with one number of ranks alone, one a line."""
    given = engine._config._param_dict
    if (given.get("elasticity") or {}).get("enabled"):
        return ['"elasticity" chooses another batch for another number of ranks']
    if given.get(_TOTAL) is None:
        return [f'the global batch would follow the number of ranks: give "{_TOTAL}"']
    if given.get(_MICRO) is not None and given.get(_ACCUMULATION) is not None:
        return [
            f'"{_TOTAL}", "{_MICRO}" and "{_ACCUMULATION}" together fix the number of ranks: leave '
            "out one of the last two"
        ]
    return []


Objects = Mapping[str, Any]


def reshaped(own: Objects, origins: Sequence[tuple[str, Objects]]) -> dict[str, Any]:
    """Objects for ``EngineState.load`` on a rank that has ``own`` as built, from those of old ones.

    ``origins`` are shard ids with objects, the nearest first, which counts; parts other than the
    positions of loaders are left as they are.  LayoutMismatchError says what cannot be taken over.
    """
    if not origins:
        raise LayoutMismatchError("no small objects of an old shard were found")
    old = origins[0][1]
    made = {
        **old,
        "training": _training(own["training"], old["training"]),
        "numbers": _numbers(own["numbers"], old["numbers"]),
        "shared": own["shared"],
    }
    if resumable_loader.NAME in old:
        # Ranks read batches in inverse proportion to their number.
        now, before = (one["training"]["batch"][_ACCUMULATION] for one in (made, old))
        positions = resumable_loader.shared_anew(old[resumable_loader.NAME], (now, before))
        made[resumable_loader.NAME] = positions
    return made


def _training(own: Objects, old: Objects) -> dict[str, Any]:
    """Progress of the old rank; the batch in parts for the new number of ranks."""
    batch = _batch(own["batch"], old["batch"])
    counters = dict(old["counters"])
    steps, rest = divmod(counters["micro_steps"], old["batch"][_ACCUMULATION])
    if rest:
        raise LayoutMismatchError(
            f"the snapshot is of a step's middle ({rest} of {old['batch'][_ACCUMULATION]} "
            "micro-batches), which another number of ranks cannot continue"
        )
    counters["micro_steps"] = steps * batch[_ACCUMULATION]
    return {**old, "batch": batch, "counters": counters}


def _batch(own: Objects, old: Objects) -> dict[str, int]:
    """The old global batch, in micro-batches as the new JSON has them."""
    micro, total = own[_MICRO], old[_TOTAL]
    copies = own[_TOTAL] // (micro * own[_ACCUMULATION])
    accumulation, rest = divmod(total, micro * copies)
    if rest:
        raise LayoutMismatchError(
            f"the global batch of the snapshot, {total}, cannot be shared by {copies} "
            f"data-parallel ranks in micro-batches of {micro}"
        )
    return {_TOTAL: total, _MICRO: micro, _ACCUMULATION: accumulation}


def _numbers(own: Objects, old: Objects) -> dict[str, Any]:
    """Numbers by master; those of masters that were cut otherwise, if all have the same."""
    if own.keys() == old.keys():
        return dict(old)
    values = list(old.values())
    if not values or any(value != values[0] for value in values):
        raise LayoutMismatchError(
            f"the optimizer keeps numbers for {len(own)} tensors here, for {len(old)} in the "
            "snapshot, and they differ: start with the old number of ranks"
        )
    return {name: values[0] for name in own}
