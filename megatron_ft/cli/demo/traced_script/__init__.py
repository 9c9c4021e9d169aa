"""A script that is trained without an edit, prepared and traced from outside.

The ``sitecustomize`` of this folder does for a checkout's own ``pretrain_gpt.py`` what
:mod:`megatron_ft.cli.demo.pretrain_gpt` does in its code: the stand-in where there is no CUDA,
and the trace.  For a DeepSpeed script it keeps DeepSpeed from compiling, and writes the trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.cli.chaos.trace import VARIABLE
from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.core.startup import before_script

CHECKOUT = "MEGATRON_LM_PATH"
"""The environment variable that names a checkout of Megatron-LM."""

OF_DEEPSPEED = "MEGATRON_FT_TRACED_DEEPSPEED"
"""The environment variable that marks a DeepSpeed script."""

SCRIPT = "pretrain_gpt.py"


def find_checkout(given: Path | None = None) -> Path:
    """The checkout that is ``given``, or else named by MEGATRON_LM_PATH, as an absolute path.

    MissingEnvironmentError if there is none, or it holds no ``pretrain_gpt.py``.
    """
    named = os.environ.get(CHECKOUT)
    if given is None and not named:
        raise MissingEnvironmentError(
            f"no checkout of Megatron-LM, whose {SCRIPT} is to run: name one in {CHECKOUT}, or "
            "with --megatron-lm-path"
        )
    checkout = (given or Path(named or "")).resolve()
    if not (checkout / SCRIPT).is_file():
        raise MissingEnvironmentError(
            f"{checkout} is no checkout of Megatron-LM: it holds no {SCRIPT}"
        )
    return checkout


def release_of(checkout: Path) -> str:
    """The version that a checkout says it has: ``0.20.0``, with ``?`` for what it does not say."""
    info = checkout / "megatron" / "core" / "package_info.py"
    text = info.read_text() if info.is_file() else ""
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.M))
    return ".".join(numbers.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def environment(
    trace: Path | None, base: Mapping[str, str] | None = None, *, deepspeed: bool = False
) -> dict[str, str]:
    """``base`` (default: this process's) with what a script needs to run here and be traced.

    Without ``trace`` it writes none.
    """
    given = dict(os.environ if base is None else base)
    if trace is not None:
        given[VARIABLE] = str(trace)
    if deepspeed:
        given = {"OMP_NUM_THREADS": "1", **given, "DS_ACCELERATOR": "cpu", OF_DEEPSPEED: "1"}
    return before_script(given, Path(__file__).parent)
