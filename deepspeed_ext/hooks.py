"""The methods of DeepSpeed's engine class that are wrapped, and when that happens.

Its constructor is called by every engine class.  Everything else is done on the one engine that
asked for it; see attachment.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megatron_ft.config.json_section import SECTION, Section, read_section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import Function, wrap

if TYPE_CHECKING:
    from deepspeed_ext.run import EngineRun

ENGINE_MODULE = "deepspeed"
RUN = "_inmem_snapshot_run"
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

    from deepspeed_ext import cpu

    cpu.prepare()
    wrap(DeepSpeedEngine, "__init__", _attaching)
    if hasattr(DeepSpeedEngine, "_take_model_step"):
        wrap(DeepSpeedEngine, "_take_model_step", _guarded)


def section_of(engine: Any) -> Section | None:
    """Our section in the engine's configuration, None if there is none.

    ConfigError if something in it is wrong.
    """
    config = getattr(engine, "_config", None)
    return read_section(getattr(config, "_param_dict", {}))


def run_of(engine: Any) -> EngineRun | None:
    """The run of an engine that was attached, else None."""
    run: EngineRun | None = vars(engine).get(RUN)
    return run


def _attaching(original: Function) -> Function:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _asks(self):
            from deepspeed_ext.unsupported import check_deepspeed

            check_deepspeed()
            from deepspeed_ext.attachment import attach

            attach(self)

    return initialise


def _guarded(original: Function) -> Function:
    """An engine that was made before the hook was there would train without protection."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if run_of(self) is None and _asks(self):
            raise ConfigError(
                f'"{SECTION}" is enabled, but this engine was made before deepspeed_ext was '
                "imported: import it before deepspeed.initialize, or call "
                "deepspeed_ext.attach(engine) right after"
            )
        return original(self, *args, **kwargs)

    return take_model_step


def _asks(engine: Any) -> bool:
    """True if the engine's configuration switches snapshots on; ConfigError if it is wrong."""
    section = section_of(engine)
    return section is not None and section.enabled
