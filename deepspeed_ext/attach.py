"""Joining one engine and its snapshots.

Only attributes of this engine are replaced, by wrappers of its own methods, so engines
without snapshots in the same process are as ever.
"""

from __future__ import annotations

import atexit
import dataclasses
from functools import partial, wraps
from typing import Any

from deepspeed_ext import manager, saving
from deepspeed_ext.run import SnapshotRun
from deepspeed_ext.unsupported import refusals
from megatron_ft.config import SnapshotConfig, Source, environment_source, resolve
from megatron_ft.config.flags import job_contradictions
from megatron_ft.config.json_section import SECTION, Section, read_section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fewer_ranks import SHRINK
from megatron_ft.core.wrapping import Function

_RUN = "_inmem_snapshot_run"
_CANNOT_SHRINK = (
    "on_no_spare shrink: DeepSpeed's files load into another number of ranks only after "
    "ds_to_universal, which is not done here; take stop, or hold under Slurm, and spares. By hand: "
    "let the job stop (code 11), run ds_to_universal on its export, start it with fewer nodes and "
    "load_universal"
)
_WITHOUT_SECTION = Section(True, Source({}, str), {})


def section_of(engine: Any) -> Section | None:
    """Our section in the engine's configuration, None if there is none.

    ConfigError if something in it is wrong.
    """
    config = getattr(engine, "_config", None)
    return read_section(getattr(config, "_param_dict", {}))


def run_of(engine: Any) -> SnapshotRun | None:
    """The run of an engine that was attached, else None."""
    run: SnapshotRun | None = engine.__dict__.get(_RUN)
    return run


def attach(engine: Any, *, follows_engine: bool = False) -> SnapshotRun | None:
    """Take snapshots of ``engine`` from now on, and restore it from one before its first step.

    Does nothing a second time, nor where the JSON has ``"enabled": false``.  Without a section
    all settings come from the environment.  ``follows_engine`` is the section's key of that name,
    for programs without one.  Raises ConfigError that lists every setting that is
    wrong or contradicts the supervisor, and every mode of the engine that cannot be captured
    safely; NotUnderSupervisorError outside ``megatron-ft run``.
    """
    run, section = run_of(engine), section_of(engine)
    if run is not None or (section is not None and not section.enabled):
        return run
    section = section or _WITHOUT_SECTION
    if follows_engine:
        section = dataclasses.replace(section, follows_engine=True)
    config = _checked(engine, section)
    run = SnapshotRun(engine, section, config, partial(manager.make_manager, config, engine))
    engine.__dict__[_RUN] = run
    saving.wrap_checkpoint_engine(engine)
    _replace_methods(engine, run)
    atexit.register(run.close)
    return run


def _checked(engine: Any, section: Section) -> SnapshotConfig:
    """The settings, unless something stands in the way of them."""
    problems = refusals(engine)
    problems += job_contradictions(section.source, "reads only a JSON file that the command names")
    config = resolve(section.source, environment_source())
    if config.on_no_spare == SHRINK:
        problems.append(_CANNOT_SHRINK)
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise ConfigError(
            f'"{SECTION}" does not work with this engine; change what is named, or train without '
            f"it:{lines}"
        )
    return config


def _replace_methods(engine: Any, run: SnapshotRun) -> None:
    step = "train_batch" if engine.pipeline_parallelism else "step"
    wrappers: dict[str, Function] = {
        step: run.around_step,
        "load_checkpoint": run.around_load,
        "save_checkpoint": run.around_save,
        "offload_states": run.around_move,
        "reload_states": run.around_move,
        "destroy": run.around_destroy,
    }
    if run.losses.on and not engine.pipeline_parallelism:
        wrappers["backward"] = run.losses.around_backward
    for name, wrapper in wrappers.items():
        original = getattr(engine, name)
        bound = partial(wrapper, original)
        # Not setattr: an engine is a Module, which looks at each value that it is given.
        engine.__dict__[name] = wraps(original)(bound)
    if not engine.pipeline_parallelism:
        run.begin_with(engine.register_forward_pre_hook(lambda *_: run.begin()))
