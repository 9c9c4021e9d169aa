"""A checkout's own ``pretrain_gpt.py``, run by tests and the demo without an edit.

What :mod:`megatron_ft.cli.demo.pretrain_gpt` does in its own code, the ``sitecustomize`` of
this folder does from outside: the stand-in where there is no CUDA, and the trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.core.startup import before_script

CHECKOUT = "MEGATRON_LM_PATH"
"""The environment variable that names a checkout of Megatron-LM."""

TRACE_DIRECTORY = "MEGATRON_FT_TESTING_TRACE_DIR"
"""The environment variable that says where a stock script's trace goes; see trace.py."""

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


def environment(trace: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's) with what a stock script needs to run and be traced."""
    given = os.environ if base is None else base
    return {**before_script(given, Path(__file__).parent), TRACE_DIRECTORY: str(trace)}
