"""Attaches snapshots to one engine, and finds this rank's place among all ranks of the job.

Only attributes of this engine are replaced, by wrappers of its own methods: engines without
snapshots in the same process stay unchanged.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from typing import Any

from deepspeed_ext import reshape, saving
from deepspeed_ext.run import EngineRun
from deepspeed_ext.start import EarlyStart
from deepspeed_ext.unsupported import refusals
from megatron_ft.config import SnapshotConfig, environment_source, resolve
from megatron_ft.config.flags import job_contradictions
from megatron_ft.config.json_section import SECTION, Section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import Function
from megatron_ft.core.identity import MAY_SHRINK, RankRule, shard_id
from megatron_ft.trainer.manager import SnapshotManager


def start_run(engine: Any, section: Section) -> EngineRun:
    config, early = _checked(engine, section), EarlyStart.claim()
    if early is not None and (place := place_of(engine)) != early.place:
        raise ConfigError(
            f"this engine makes its process {place['shard_id']}, and what it starts from was "
            f'decided for {early.place["shard_id"]}: train without "{SECTION}"'
        )
    run = EngineRun(engine, section, lambda: make_manager(config, engine), early)
    saving.wrap_checkpoint_engine(engine)
    _replace_methods(engine, run)
    atexit.register(run.close)
    return run


def _checked(engine: Any, section: Section) -> SnapshotConfig:
    problems = refusals(engine)
    problems += job_contradictions(section.source, "reads only a JSON file that the command names")
    config = resolve(section.source, environment_source())
    if config.on_no_spare in MAY_SHRINK:
        problems += [
            f"on_no_spare {config.on_no_spare}: {reason}" for reason in reshape.refusals(engine)
        ]
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise ConfigError(
            f'"{SECTION}" does not work with this engine; change what is named, or train without '
            f"it:{lines}"
        )
    return config


def _replace_methods(engine: Any, run: EngineRun) -> None:
    step = "train_batch" if engine.pipeline_parallelism else "step"
    wrappers: dict[str, Function] = {
        step: run.around_step,
        "load_checkpoint": run.around_load,
        "save_checkpoint": run.around_save,
        "offload_states": run.around_move,
        "reload_states": run.around_move,
        "destroy": run.around_destroy,
    }
    for name, wrapper in wrappers.items():
        original = getattr(engine, name)
        bound = partial(wrapper, original)
        # Not setattr: an engine is a Module, which looks at each value that it is given.
        engine.__dict__[name] = wraps(original)(bound)


def make_manager(config: SnapshotConfig, engine: Any) -> SnapshotManager:
    """The manager of this rank, named by its place in DeepSpeed's parallel groups.

    NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return manager_at(config, place_of(engine), reshape.rule_of(engine))


def manager_at(
    config: SnapshotConfig, place: Mapping[str, Any], rule: RankRule | None = None
) -> SnapshotManager:
    return SnapshotManager(config, **place, rank_rule=rule)


_PIPELINE_RANK = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank")
_TENSOR_RANK = (
    "get_tensor_model_parallel_rank",
    "get_slice_parallel_rank",
    "get_model_parallel_rank",
)
"""Names of an mpu's methods, the most precise first: Megatron's, DeepSpeed's, and old ones."""


def place_of(engine: Any) -> dict[str, Any]:
    """This rank's place, as keywords of SnapshotManager.  Collective over all ranks.

    The data-parallel rank is that in the group over which ZeRO partitions, sequence-parallel
    ranks included, so that pipeline, tensor and data-parallel rank name a rank uniquely.
    ``coordinates`` leave out the data-parallel one: ranks that agree in them hold partitions
    of one size, which DeepSpeed pads to be equal.  They keep the experts' one, so that a
    stripe is made of one expert-data-parallel group where the nodes allow it.
    Raises ConfigError if the job's mpu gives two ranks one place.
    """
    from torch import distributed

    pp = mpu_rank(engine.mpu, _PIPELINE_RANK)
    tp = mpu_rank(engine.mpu, _TENSOR_RANK)
    dp = distributed.get_rank(engine.seq_data_parallel_group)
    ep = distributed.get_rank(group) if (group := _largest_expert_group(engine)) else 0
    name = shard_id(pp=pp, tp=tp, dp=dp, ep=ep)
    names: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(names, name)
    check_unique(names)
    return {
        "shard_id": name,
        "rank": distributed.get_rank(),
        "coordinates": (pp, tp, ep),
    }


def mpu_rank(mpu: Any, names: Sequence[str]) -> int:
    """The result of the first of these methods that an mpu has; 0 if it has none."""
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return int(method())
    return 0


def check_unique(names: Sequence[str]) -> None:
    """Raise ConfigError that names the first two ranks with one shard id."""
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name in first:
            raise ConfigError(
                f"ranks {first[name]} and {rank} are both {name}: the mpu given to "
                "deepspeed.initialize reports one place for both. Each rank needs a pipeline, "
                "tensor and data-parallel rank of its own "
                f"({', '.join((*_PIPELINE_RANK, *_TENSOR_RANK))}, get_data_parallel_group)"
            )
        first[name] = rank


def _largest_expert_group(engine: Any) -> Any:
    """The expert-parallel group of most ranks that this rank is in, None without experts."""
    from torch import distributed

    groups: Mapping[str, Any] = getattr(engine, "expert_parallel_group", None) or {}
    if not engine.has_moe_layers or not groups:
        return None
    return max(groups.values(), key=distributed.get_world_size)
