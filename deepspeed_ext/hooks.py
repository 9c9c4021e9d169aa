"""The method of DeepSpeed's engine that is wrapped, and when that happens.

``_configure_checkpointing`` is called once by every engine class, when optimizer and schedule
exist.  Everything else is done on the one engine that asked for it; see attachment.py.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ft.config.json_section import SECTION
from megatron_ft.core.errors import ConfigError, UnsupportedVersionError
from megatron_ft.core.frameworks import Function, wrap

ENGINE_MODULE = "deepspeed"


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
    from deepspeed_ext.unsupported import check_deepspeed

    try:
        check_deepspeed()
    except UnsupportedVersionError as error:
        refusal = str(error)
        wrap(DeepSpeedEngine, "__init__", lambda original: _refusing(original, refusal))
        return
    cpu.prepare()
    wrap(DeepSpeedEngine, "_configure_checkpointing", _attaching)
    wrap(DeepSpeedEngine, "_take_model_step", _guarded)


def _refusing(original: Function, refusal: str) -> Function:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _asks(self):
            raise UnsupportedVersionError(refusal)

    return initialise


def _attaching(original: Function) -> Function:
    def configure_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _asks(self):
            from deepspeed_ext.attachment import attach

            attach(self)
        return result

    return configure_checkpointing


def _guarded(original: Function) -> Function:
    """An engine that was made before the hook was there would train without protection."""

    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.attachment import run_of

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
    from deepspeed_ext.attachment import section_of

    section = section_of(engine)
    return section is not None and section.enabled
