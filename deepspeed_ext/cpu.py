"""Prepares DeepSpeed for machines without an accelerator.

Started on a CPU, DeepSpeed compiles a shared-memory collective before it joins the job.  That
needs a compiler and ninja, takes minutes without a message, waits for ever for the lock of a build
that was killed, and under DeepSpeed's launcher leaves 69 MB a rank in /dev/shm.  Training never
calls that collective: it serves tensor-parallel inference, which falls back to an all-reduce.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_ft.core.procfs import PROC

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's name of the collective, a key of ``deepspeed.ops.__compatible_ops__``."""

SHARED_MEMORY = Path("/dev/shm")
_BUFFERS = "deepspeed_allreduce_buffer_*"


class CpuWarning(UserWarning):
    """Something outside this job that costs it memory, or that it may wait for for ever."""


def on_cpu() -> bool:
    """True if DeepSpeed trains on the CPU here; imports DeepSpeed."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")


def prepare() -> None:
    """On a CPU, keep DeepSpeed from compiling, and warn of what other jobs left.

    Call it before torch.distributed is started.  It acts with and without a compiler: both then
    train with the same collectives, so a job may move between such machines.  The first rank of a
    machine warns with CpuWarning.
    """
    if not on_cpu():
        return
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for problem in (*buffer_problems(), *lock_problems(build_root())):
            warnings.warn(problem, CpuWarning, stacklevel=2)


def buffer_problems(folder: Path = SHARED_MEMORY) -> list[str]:
    """A sentence about collective buffers in ``folder`` that no process maps any more."""
    found = [path for path in folder.glob(_BUFFERS) if path.stat().st_uid == os.getuid()]
    used = _of_all_processes(_mapped) if found else set()
    left = [path for path in found if str(path) not in used]
    size = sum(path.stat().st_blocks * 512 for path in left)
    what = f"{len(left)} buffers of DeepSpeed runs that have ended hold {size >> 20} MiB of"
    return [f"{what} {folder}: rm {folder}/{_BUFFERS}"] if left else []


def lock_problems(root: Path) -> list[str]:
    """A sentence about each lock below ``root`` that no process of this machine holds.

    torch keeps the lock file of an extension's build open until the build is done
    (torch.utils.file_baton).  A process that finds the file waits until it is gone.
    """
    # torch's own root has a folder for each Python and device above those of the extensions.
    locks = sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])
    held = _of_all_processes(_opened) if locks else set()
    return [
        f"{lock} is left of a build that was killed, unless it runs on another machine: DeepSpeed "
        f"will wait for it for ever if it needs {lock.parent.name}; remove the file"
        for lock in locks
        if str(lock.resolve()) not in held
    ]


def build_root() -> Path:
    """The folder below which torch keeps the extensions that it builds."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _opened(process: Path) -> Iterable[str]:
    return (os.readlink(entry) for entry in (process / "fd").iterdir())


def _mapped(process: Path) -> Iterable[str]:
    lines = (process / "maps").read_text().splitlines()
    return (words[5] for line in lines if len(words := line.split(None, 5)) == 6)


def _of_all_processes(files: Callable[[Path], Iterable[str]]) -> set[str]:
    """Files of the processes that this one may inspect."""
    found: set[str] = set()
    for process in PROC.iterdir():
        try:
            found.update(files(process) if process.name.isdigit() else ())
        except OSError:  # it has ended, or is another user's
            continue
    return found
