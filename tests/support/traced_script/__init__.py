"""A script that is trained without an edit, prepared and traced from outside.

The ``sitecustomize`` of this folder does for a checkout's own ``pretrain_gpt.py`` what
:mod:`megatron_ft.cli.demo.pretrain_gpt` does in its code: the stand-in where there is no CUDA,
and the trace.  For a DeepSpeed script it keeps DeepSpeed from compiling, and writes the trace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.cli.chaos.trace import VARIABLE
from megatron_ft.core.startup import before_script
from tests.support.traced_script.sitecustomize import OF_DEEPSPEED

CHECKOUT = "MEGATRON_LM_PATH"
"""The environment variable that names a checkout of Megatron-LM."""

SCRIPT = "pretrain_gpt.py"


def find_checkout() -> Path:
    """The checkout that MEGATRON_LM_PATH names, as an absolute path."""
    checkout = Path(os.environ[CHECKOUT]).resolve()
    assert (checkout / SCRIPT).is_file(), f"{checkout} holds no {SCRIPT}"
    return checkout


def environment(
    trace: Path | None, base: Mapping[str, str] | None = None, *, deepspeed: bool = False
) -> dict[str, str]:
    """``base`` (default: this process's) with what a script needs to run here and be traced.

    Without ``trace`` it writes none.  A DeepSpeed script also needs the checkout's root on
    PYTHONPATH.
    """
    given = dict(os.environ if base is None else base)
    if trace is not None:
        given[VARIABLE] = str(trace)
    if deepspeed:
        given = {"OMP_NUM_THREADS": "1", **given, "DS_ACCELERATOR": "cpu", OF_DEEPSPEED: "1"}
    return before_script(given, Path(__file__).parent)
