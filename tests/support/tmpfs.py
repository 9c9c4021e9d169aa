"""A tmpfs of its own for one test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount_tmpfs(mounted: Path, options: str) -> Iterator[Path]:
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(mounted)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.call(command) != 0:
        pytest.skip("cannot mount a tmpfs: needs root and the right to mount")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)
