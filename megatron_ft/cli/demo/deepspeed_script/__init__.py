"""A DeepSpeed training script, run by tests and the demo without an edit.

The ``sitecustomize`` of this folder does from outside what the script does not: it keeps
DeepSpeed from compiling where there is no accelerator, and makes the engine write a trace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.core.startup import before_script

TRACE_DIRECTORY = "MEGATRON_FT_TESTING_DEEPSPEED_TRACE_DIR"
"""The environment variable that says where the trace goes; see megatron_ft.cli.demo.trace."""


def environment(trace: Path | None, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's) with what a script needs to run here and be traced.

    Without ``trace`` it writes none.
    """
    given = {**(os.environ if base is None else base), "DS_ACCELERATOR": "cpu"}
    given = {"OMP_NUM_THREADS": "1", **given}
    if trace is not None:
        given[TRACE_DIRECTORY] = str(trace)
    return before_script(given, Path(__file__).parent)
