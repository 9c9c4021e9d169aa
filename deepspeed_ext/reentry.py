"""Destroys DeepSpeed's engines and resets its modules before training is entered again.

DeepSpeed keeps its groups, communication backend, parameter hooks and modes in variables of its
modules, and destroys none of them itself.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

from deepspeed_ext.unsupported import check_deepspeed
from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.trainer.package_state import PackageState
from megatron_ft.trainer.resilient import RestartClient
from megatron_ft.trainer.teardown import on_entry, on_teardown

log = logging.getLogger(__name__)

_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines of this process that may have to be destroyed."""

_before: PackageState


def install() -> None:
    """Have DeepSpeed's modules noted before training is entered: now, if it was already.

    A release in which a teardown may fail declines restarts in process.
    """
    on_entry(_note)
    if (client := RestartClient.current) is not None:
        try:
            _note()
        except UnsupportedVersionError as error:
            log.warning("training cannot restart in process, but in a new one: %s", error)
            client.close()


def watch(engine: Any) -> None:
    _engines.add(engine)


def _note() -> None:
    global _before
    check_deepspeed()
    _before = PackageState("deepspeed")
    on_teardown(_reset)


def _reset() -> None:
    for engine in list(_engines):
        engine.destroy()
    _engines.clear()
    _before.restore()
    # Modules that forward passes of ZeRO-3 are in; its content stays, as a container's does.
    offload: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    getattr(offload, "FWD_MODULE_STACK", []).clear()
