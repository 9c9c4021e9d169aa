"""Reports what a trainer sees, from a process that is started as one.

Its source is given to the Python of the training command, inside whatever wraps that
Python: so it needs nothing but the standard library, of any release from 3.8 on.
The argument is the name of the marker file in the node's folder.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata

PACKAGES = (
    "torch", "megatron-core", "deepspeed", "mpi4py", "numpy", "msgspec", "pyzmq", "pyeclib",
)  # fmt: skip


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed, without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def view(marker: str) -> dict[str, object]:
    seen: dict[str, object] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": versions(PACKAGES),
        "cgroup": "",
        "user": os.geteuid(),
        "cores": len(os.sched_getaffinity(0)),
    }
    try:
        with open("/proc/self/cgroup") as file:
            seen["cgroup"] = file.read()
        seen["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
        status = os.stat(os.path.join(os.environ["MEGATRON_FT_NODE_DIR"], marker))
        seen["device"], seen["inode"] = status.st_dev, status.st_ino
    except KeyError as error:
        seen["error"] = f"{error} is not in its environment, which must reach it"
    except OSError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    return seen


if __name__ == "__main__":
    print("MEGATRON-FT-DOCTOR " + json.dumps(view(sys.argv[1])), flush=True)
