"""DeepSpeed on a CPU: nothing is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ext import hooks

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")

SHARED_MEMORY = Path("/dev/shm")


_START = """
import torch, deepspeed
from deepspeed_ext import hooks

hooks.prepare_cpu()
deepspeed.init_distributed()
total = torch.ones(1)
deepspeed.comm.inference_all_reduce(total)
deepspeed.comm.destroy_process_group()
print("started", deepspeed.comm.comm.cdb is None or total.item())
"""


@pytest.mark.deepspeed
@needs_deepspeed
def test_deepspeed_starts_without_compiler_and_ninja(tmp_path: Path) -> None:
    extensions, home = tmp_path / "extensions", tmp_path / "home"
    lock = extensions / hooks.SHARED_MEMORY_OP / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # without us DeepSpeed would wait here
    home.mkdir()
    environment = {
        "HOME": str(home),
        "PATH": "/nonexistent",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "1",  # of DeepSpeed's launcher: makes its buffers in shared memory
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    before = set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))
    done = subprocess.run(
        [sys.executable, "-c", _START], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "started" in done.stdout
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]
    assert set(SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")) == before


@pytest.mark.deepspeed
@needs_deepspeed
def test_with_an_accelerator_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(device_name=lambda: "cuda")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", None)  # importing it fails
    hooks.prepare_cpu()
