"""Containers of podman without an image: an empty root into which this machine is mounted."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.jobs import ROOT

START_SECONDS = 60.0
_RUNTIMES = ("crun", "runc")


def root_in(folder: Path) -> Path:
    """A root file system of a container, with nothing in it."""
    root = folder / "root"
    for name in ("usr", "etc", "proc", "sys", "dev", "run", "tmp", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    return root


def client(*flags: str, verb: str = "run") -> list[str]:
    """``podman run`` up to its flags, of which the last is to be ``--rootfs ROOT``.

    Programs, Python and this checkout are at the paths that they have outside.
    """
    runtime = working_runtime()
    assert runtime, missing()
    return _client(runtime, verb, flags)


def _client(runtime: str, verb: str, flags: Sequence[str]) -> list[str]:
    # podman asks for more than a root without CAP_SYS_RESOURCE may have.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    ulimits = [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096"]
    mounts = [f"--volume={path}:{path}" for path in _mounted()]
    return ["podman", verb, "--runtime", runtime, *ulimits, *mounts, *flags]


def _mounted() -> list[str]:
    paths = ["/usr", "/etc", tempfile.gettempdir(), str(ROOT), sys.prefix, sys.base_prefix]
    # Links in an environment lead to its folder by other names.
    paths += [str(Path(path).resolve()) for path in (*paths, sys.executable)]
    folders = [path for path in dict.fromkeys(paths) if Path(path).is_dir()]
    return [p for p in folders if not any(p != o and Path(p).is_relative_to(o) for o in folders)]


@functools.cache
def working_runtime() -> str:
    """The runtime with which podman starts a container here; empty if with none."""
    if os.geteuid() or shutil.which("podman") is None:
        return ""
    with tempfile.TemporaryDirectory(prefix="mft-container-") as folder:
        root = root_in(Path(folder))
        for runtime in _RUNTIMES:
            command = [*_client(runtime, "run", ["--rm", "--network=host"]), "--rootfs", str(root)]
            tried = subprocess.run(
                [*command, "true"], capture_output=True, timeout=START_SECONDS, check=False
            )
            if tried.returncode == 0:
                return runtime
    return ""


def missing() -> str:
    """Why there can be no container here, or nothing."""
    if working_runtime():
        return ""
    return "needs root, podman, and crun or runc with which it can start a container"
