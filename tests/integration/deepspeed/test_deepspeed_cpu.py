"""DeepSpeed on a CPU: nothing is compiled, and what others left is said, not removed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepspeed_ext import cpu

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")

BUFFER = "deepspeed_allreduce_buffer_0_1000_0.0.0.0_29500_0"


def test_a_buffer_without_a_process_is_told_with_its_size(tmp_path: Path) -> None:
    (tmp_path / BUFFER).write_bytes(b"\1" * (3 << 20))
    (tmp_path / "another_program").write_bytes(b"\1" * (1 << 20))
    (problem,) = cpu.buffer_problems(tmp_path)
    assert problem.startswith("1 buffers of DeepSpeed runs that have ended hold 3 MiB")
    assert str(tmp_path / "deepspeed_allreduce_buffer_*") in problem
    assert (tmp_path / BUFFER).exists()


def test_a_buffer_in_use_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / BUFFER
    path.write_bytes(b"\1" * mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert cpu.buffer_problems(tmp_path) == []
    assert len(cpu.buffer_problems(tmp_path)) == 1
    path.unlink()
    assert cpu.buffer_problems(tmp_path) == []


@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_a_lock_that_nobody_holds_is_told(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / folder / "lock"
    lock.parent.mkdir(parents=True)
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert cpu.lock_problems(tmp_path) == []  # its build runs, here
    assert baton.fd is not None
    os.close(baton.fd)  # as when its process is killed
    (problem,) = cpu.lock_problems(tmp_path)
    assert str(lock) in problem and "wait for it for ever if it needs cpu_adam" in problem
    assert lock.exists()


def test_torchs_own_folder_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(extensions.os, "makedirs", lambda *_, **__: None)
    folder = Path(extensions._get_build_directory("cpu_adam", verbose=False))
    assert folder.parent.parent == cpu.build_root()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    folder = Path(extensions._get_build_directory("cpu_adam", verbose=False))
    assert folder.parent == cpu.build_root()


_START = """
import torch, deepspeed
from deepspeed_ext import cpu

cpu.prepare()
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
    lock = extensions / cpu.SHARED_MEMORY_OP / "lock"
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
    before = set(cpu.SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))
    done = subprocess.run(
        [sys.executable, "-c", _START],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "started" in done.stdout
    assert f"{lock} is left of a build that was killed" in done.stderr
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]
    assert set(cpu.SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*")) == before


@pytest.mark.deepspeed
@needs_deepspeed
def test_with_an_accelerator_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    monkeypatch.setattr(cpu, "buffer_problems", lambda *_: pytest.fail("looked"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", None)  # importing it fails
    cpu.prepare()
