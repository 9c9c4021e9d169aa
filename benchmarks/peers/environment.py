"""The virtual environment that peers are installed into, made once and kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PEERS = (
    "torch_checkpointing==0.1.1",
    "nvidia-resiliency-ext==0.4.1",
    "dlrover==0.6.1",
    "lm-resiliency==0.2.0",
)
"""Installed without what they ask for: some ask for builds that need a GPU."""

NEEDED = (
    "aiofiles==25.1.0",
    "aiohttp==3.14.5",
    "defusedxml==0.7.1",
    "Deprecated==1.3.1",
    "grpcio==1.85.1",
    "importlib-metadata==10.2.0",
    "kubernetes==37.0.2",
    "nest-asyncio==1.6.0",
    "nvidia-ml-py==13.615.71",
    "protobuf==7.36.2",
    "psutil==7.2.2",
    "pynvml==13.0.1",
    "requests==2.34.2",
    "safetensors==0.8.0",
    "setproctitle==1.3.8",
    "tensordict==0.15.3",
    "tornado==6.6.1",
)
"""What peers import when they save and load, nothing of it bound to a GPU."""

SHARED = ("numpy", "packaging", "pyyaml", "msgspec", "pyzmq")
"""In the versions that run here: the measured training is ours."""

INSTALL_SECONDS = 1200.0


def default_folder() -> Path:
    """Where environments are kept, one for each set of versions."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron-ft" / f"peers-{fingerprint(steps())}"


def steps() -> list[list[str]]:
    """Arguments of pip, one list a call; torch first, so that no other wish chooses its build."""
    return [
        [f"torch=={version('torch')}"],
        [*NEEDED, *(f"{name}=={version(name)}" for name in SHARED)],
        ["--no-deps", *PEERS],
    ]


def fingerprint(calls: Sequence[Sequence[str]]) -> str:
    """Short name of an interpreter and what is installed for it."""
    words = [sys.version, *(word for call in calls for word in call)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def prepared(folder: Path) -> Path:
    """The environment's Python; made now if it is not there or was left half done.

    Raises RuntimeError with pip's last words: without a package index that has these versions
    (PIP_INDEX_URL, PIP_FIND_LINKS) peers cannot be measured.
    """
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"installing peers into {folder}; once, some minutes", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        for call in steps():
            _run([str(python), "-m", "pip", "install", "--quiet", *call])
        done.touch()
    return python


def _run(command: list[str]) -> None:
    clean = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PIP_TARGET")}
    ended = subprocess.run(
        command, env=clean, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed: {ended.stderr[-1500:]}")
