"""The stand-in for CUDA devices on a build of torch that knows CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "programs" / "cuda_build.py"


def test_an_optimizer_steps_on_a_cuda_build_without_a_device() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
