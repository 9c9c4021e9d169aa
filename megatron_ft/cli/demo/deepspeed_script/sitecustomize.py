"""Run by ``site`` before a DeepSpeed script: no compiling, and the trace."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ft.cli.demo.deepspeed_script import TRACE_DIRECTORY
from megatron_ft.core.startup import DEEPSPEED
from megatron_ft.core.startup.sitecustomize import AfterImport, run_hidden


def prepare_cpu() -> None:
    """DeepSpeed was imported: nothing is to be compiled for it."""
    from deepspeed_ext import cpu

    cpu.prepare()


def trace() -> None:
    """DeepSpeed was imported: make its engines write their trace."""
    from megatron_ft.cli.demo.deepspeed_script import engine_trace

    engine_trace.install(Path(os.environ[TRACE_DIRECTORY]))


if __name__ == "sitecustomize":
    AfterImport(DEEPSPEED, prepare_cpu).install()
    if TRACE_DIRECTORY in os.environ:
        AfterImport(DEEPSPEED, trace).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
