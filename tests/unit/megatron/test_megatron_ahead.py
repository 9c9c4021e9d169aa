"""Megatron as a trainer host prepares it before it forks, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "programs" / "megatron_ahead.py"
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("megatron") is None or find_spec("megatron.training") is None,
        reason="needs megatron-core with megatron.training",
    ),
]


def test_a_host_of_the_demo_has_megatron_with_hooks_and_a_parser(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as a host is started
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "left to the trainers" not in done.stderr
