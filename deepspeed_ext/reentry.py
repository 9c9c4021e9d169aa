"""Destroys DeepSpeed's engines and resets its modules before training is entered again.

DeepSpeed keeps its groups, communication backend, parameter hooks and modes in variables of its
modules, and destroys none of them itself.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

from deepspeed_ext.unsupported import check_deepspeed
from megatron_ft.trainer.package_state import PackageState
from megatron_ft.trainer.teardown import on_teardown

_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines of this process that may have to be destroyed."""


def install() -> None:
    """Note DeepSpeed's modules as they are now, right behind their import."""
    on_teardown(partial(_reset, PackageState("deepspeed")))


def watch(engine: Any) -> None:
    """Have ``engine`` destroyed if it is still there when training is to be entered again."""
    _engines.add(engine)


def _reset(before: PackageState) -> None:
    """Destroy all engines; UnsupportedVersionError for a release in which that may fail."""
    check_deepspeed()
    for engine in list(_engines):
        engine.destroy()
    _engines.clear()
    before.restore()
    # Modules that forward passes of ZeRO-3 are in; its content stays, as a container's does.
    offload: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    getattr(offload, "FWD_MODULE_STACK", []).clear()
