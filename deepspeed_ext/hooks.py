"""The methods of DeepSpeed's engine class that are wrapped, and when that happens.

Its constructor is called by every engine class.  Everything else is done on the one engine that
asked for it; see attachment.py.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from megatron_ft.config import Source
from megatron_ft.config.json_section import SECTION, Section, read_section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import Function, wrap

if TYPE_CHECKING:
    from deepspeed_ext.run import EngineRun

ENGINE_MODULE = "deepspeed"
SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's name of a collective, a key of ``deepspeed.ops.__compatible_ops__``."""
_RUN = "_inmem_snapshot_run"
"""Attribute of an engine that was attached."""


def install_after_import() -> None:
    """Wrap DeepSpeed's engine class now if it was imported, else right behind its import."""
    from megatron_ft.core.startup.sitecustomize import AfterImport

    if ENGINE_MODULE in sys.modules:
        install()
    else:
        AfterImport(ENGINE_MODULE, install).install()


def install() -> None:
    """Wrap the engine class in this process; a second call changes nothing.

    A release that cannot work is refused by the engines that ask for snapshots, not here:
    programs without our section have nothing to do with it.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_ext import reentry

    prepare_cpu()
    reentry.install()
    wrap(DeepSpeedEngine, "__init__", _attaching)
    if hasattr(DeepSpeedEngine, "_take_model_step"):
        wrap(DeepSpeedEngine, "_take_model_step", _guarded)


def prepare_cpu() -> None:
    """On a CPU, keep DeepSpeed from compiling; call it before torch.distributed is started.

    DeepSpeed compiles a shared-memory collective before it joins the job.  That needs a compiler
    and ninja, takes minutes without a message, waits for ever for the lock of a build that was
    killed, and under DeepSpeed's launcher leaves 69 MB a rank in /dev/shm.  Training never calls
    it: it serves tensor-parallel inference, which falls back to an all-reduce.  With and without a
    compiler jobs then train with the same collectives, and may move between such machines.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


def attach(engine: Any, *, follows_engine: bool | None = None) -> EngineRun | None:
    """Take snapshots of ``engine`` from now on, and restore it from one before its first step.

    Does nothing a second time, nor where the JSON has ``"enabled": false``.  Without a section
    all settings come from the environment.  ``follows_engine`` is the section's key of that name,
    for programs without one.  Raises ConfigError that lists every setting that is
    wrong or contradicts the supervisor, and every mode of the engine that cannot be captured
    safely; NotUnderSupervisorError outside ``megatron-ft run``; UnsupportedVersionError.
    """
    run, section = run_of(engine), _section_of(engine)
    if run is not None or (section is not None and not section.enabled):
        return run
    from deepspeed_ext.unsupported import check_deepspeed

    # Before anything is imported that an old release does not have.
    check_deepspeed()
    from deepspeed_ext.attachment import start_run

    section = section or Section(True, Source({}, str), {})
    if follows_engine is not None:
        section = dataclasses.replace(section, follows_engine=follows_engine)
    run = vars(engine)[_RUN] = start_run(engine, section)
    return run


def run_of(engine: Any) -> EngineRun | None:
    run: EngineRun | None = vars(engine).get(_RUN)
    return run


def _attaching(original: Function) -> Function:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext import reentry

        reentry.watch(self)
        original(self, *args, **kwargs)
        # An engine that only evaluates, such as a frozen model, has none.
        if getattr(self, "checkpoint_engine", None) is not None and _section_of(self) is not None:
            attach(self)

    return initialise


def _guarded(original: Function) -> Function:
    """An engine that was made before the hook was there would train without protection."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        section = None if run_of(self) else _section_of(self)
        if section is not None and section.enabled:
            raise ConfigError(
                f'"{SECTION}" is enabled, but this engine was made before deepspeed_ext was '
                "imported: import it before deepspeed.initialize, or call "
                "deepspeed_ext.attach(engine) right after"
            )
        return original(self, *args, **kwargs)

    return take_model_step


def _section_of(engine: Any) -> Section | None:
    config = getattr(engine, "_config", None)
    return read_section(getattr(config, "_param_dict", {}))
