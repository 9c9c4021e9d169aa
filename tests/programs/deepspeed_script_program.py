"""Ranks of examples/deepspeed_gpt.py alone, forked from a process that has imported DeepSpeed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "deepspeed_gpt.py"


def preload() -> None:
    import deepspeed  # noqa: F401
    import deepspeed.ops
    import torch
    from deepspeed.pipe import PipelineModule  # noqa: F401

    import tests.support.deepspeed_trace  # noqa: F401

    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    # What deepspeed_ext.hooks.prepare_cpu does, without a module of it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train() -> None:
    """Run the script with the flags behind the first, which is the folder of the trace."""
    from tests.support import deepspeed_trace

    trace, *flags = sys.argv[1:]
    deepspeed_trace.install(Path(trace))
    sys.argv = [str(SCRIPT), *flags]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    ours = [name for name in sys.modules if name.startswith("deepspeed_ext")]
    assert not ours, f"trained with {ours}"
