"""Run by ``site`` before a traced script: hooks behind what the script imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.cli.chaos.trace import VARIABLE
from megatron_ft.core.startup import DEEPSPEED, LOOP
from megatron_ft.core.startup.sitecustomize import AfterImport, after_import, run_hidden

OF_DEEPSPEED = "MEGATRON_FT_TRACED_DEEPSPEED"
"""The environment variable that marks a DeepSpeed script."""


class BeforeImport:
    """A finder that finds nothing, but calls a function once, when a module is first wanted."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Nothing; the other finders are asked next."""
        if fullname == self._name:
            sys.meta_path.remove(self)
            self._call()


def stand_in() -> None:
    """Pretend, before Megatron is imported, that there are devices if there are none."""
    from importlib.util import module_from_spec, spec_from_file_location

    from megatron_ft.cli.demo import cpu_device

    # By its path: a checkout of Megatron-LM has a package "tests" of its own.
    spec: Any = spec_from_file_location(
        "megatron_host", Path(__file__).parents[1] / "megatron_host.py"
    )
    host = module_from_spec(spec)
    spec.loader.exec_module(host)
    if cpu_device.needed():
        cpu_device.install(megatron=False)
        for module, fill in host.MEGATRON_PARTS.items():
            AfterImport(module, fill).install()


def prepare_deepspeed() -> None:
    """Keep DeepSpeed, which was imported, from compiling."""
    from deepspeed_ext import hooks

    hooks.prepare_cpu()


def trace_megatron() -> None:
    from megatron_ft.cli.demo import megatron_trace

    megatron_trace.install(Path(os.environ[VARIABLE]))


def trace_deepspeed() -> None:
    """Make the engines of DeepSpeed, which was imported, write their trace."""
    from tests.support import deepspeed_trace

    deepspeed_trace.install(Path(os.environ[VARIABLE]))


if __name__ == "sitecustomize":
    if OF_DEEPSPEED in os.environ:
        after_import(DEEPSPEED, prepare_deepspeed)
        if VARIABLE in os.environ:
            after_import(DEEPSPEED, trace_deepspeed)
    else:
        sys.meta_path.insert(0, BeforeImport("megatron", stand_in))
        if VARIABLE in os.environ:
            after_import(LOOP, trace_megatron)
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
