"""Run by ``site`` before a stock script: the stand-in and the trace, once it imports Megatron."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_ft.cli.demo.stock_script import TRACE_DIRECTORY
from megatron_ft.core.startup import LOOP
from megatron_ft.core.startup.sitecustomize import AfterImport, run_hidden


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
    """Megatron is about to be imported: pretend that there are devices, if there are none."""
    from megatron_ft.cli.demo import cpu_device

    if cpu_device.needed():
        cpu_device.install(megatron=False)
        for module, fill in cpu_device.MEGATRON_GROUPS.items():
            AfterImport(module, fill).install()


def trace() -> None:
    """Megatron's loop was imported: make it write its trace."""
    from megatron_ft.cli.demo import training_trace

    training_trace.install(Path(os.environ[TRACE_DIRECTORY]))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, BeforeImport("megatron", stand_in))
    if TRACE_DIRECTORY in os.environ:
        AfterImport(LOOP, trace).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
