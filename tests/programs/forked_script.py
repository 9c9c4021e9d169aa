"""Prints all that a process sees of itself, and others see of it; beside modules that misbehave.

The test puts it into a folder as ``train.py``, where ``ends`` is ends_as_told.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading

before = sorted(name for name in sys.modules if name.startswith("megatron."))
loaded = "torch" in sys.modules

import megatron.threads  # noqa: E402
import megatron.variables  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which making an optimizer imports; it sets a variable
from megatron.package import both, part  # noqa: E402

try:
    import megatron.broken  # noqa: F401
except ValueError as error:
    said = str(error)


def shown(name: str) -> list[str]:
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read().rstrip(b"\0").decode().split("\0")


same = {
    "argv": sys.argv,
    "orig": sys.orig_argv,
    "file": __file__,
    "name": __name__,
    "spec": str(__spec__),
    "main": sys.modules["__main__"].__file__,
    "path": sys.path,
    "cwd": os.getcwd(),
    "umask": oct(os.umask(0)),
    "env": dict(os.environ),
    "command": shown("cmdline"),
    "threads": torch.get_num_threads(),
    "stdin": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpid(),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    "processors": sorted(os.sched_getaffinity(0)),
    "custom": vars(sys)["custom"],
    "terminate": str(signal.getsignal(signal.SIGTERM)),
    "interrupt": str(signal.getsignal(signal.SIGINT)),
    "all": threading.active_count(),
    "said": said,
    "both": both,
    "part": part.__name__,
    "flags": str(sys.flags),
    "user": getattr(sys, "user", 0),
}
first = shown("environ")

import numpy  # noqa: E402

told = {
    "same": same,
    "before": before,
    "loaded": loaded,
    "shown": first,
    "pid": os.getpid(),
    "chance": numpy.random.rand(),
    "seed": torch.initial_seed(),
    "fds": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(told), flush=True)

import ends  # type: ignore[import-not-found]  # noqa: E402, F401
