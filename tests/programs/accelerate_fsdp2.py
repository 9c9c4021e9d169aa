"""The example of Accelerate with FSDP2, on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft import run_resilient
from tests.support.accelerate_cpu import shard_on_cpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"


def load(make: Callable[..., Any]) -> Any:
    """The example as a module; its Accelerators are those of ``make(class, **given)``."""
    spec = importlib.util.spec_from_file_location("accelerate_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Accelerator = partial(make, module.Accelerator)
    return module


def sharding(kind: Callable[..., Any], **given: Any) -> Any:
    accelerator = kind(**given)
    shard_on_cpu(accelerator, given["fsdp_plugin"])
    return accelerator


if __name__ == "__main__":
    sys.argv.append("--fsdp2")
    run_resilient(load(sharding).main)
