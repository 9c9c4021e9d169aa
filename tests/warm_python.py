"""Processes that run a Python script without waiting for its imports.

Importing torch and leaving it again takes three seconds of processor time in every trainer,
and the tests of whole jobs start some seventy of them.  The server imports once, starts no
thread, and forks.  A forked process is a trainer in all that tests and the virtual cluster
look at: number, session, output, exit status, and the environment that /proc shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOM_VARIABLE = "TEST_WARM_PYTHON_ROOM"
ROOM_BYTES = 100_000
"""The server starts with an environment of this size, so that any other fits into its place."""


class WarmPython:
    """The tests' end of the server."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", ROOM_VARIABLE: "x" * ROOM_BYTES}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, script: Sequence[str], env: Mapping[str, str], log: Path) -> WarmChild:
        """A process that will run a script with its arguments, in a new session.

        It is there at once and begins when it is let ``go``; output is appended to ``log``.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        request = {"argv": list(script), "env": dict(env), "log": str(log)}
        return WarmChild(int(self._ask(request)), self)

    def close(self) -> None:
        """End the server."""
        self._process.communicate(timeout=20)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the server ended with status {self._process.wait(10)}"
        return json.loads(answer)


@dataclass(frozen=True)
class WarmChild:
    """What launch.process needs of its child: subprocess.Popen's ``pid`` and ``wait``."""

    pid: int
    server: WarmPython

    def go(self) -> None:
        """Let it begin; nothing happens if it has ended."""
        self.server._ask({"go": self.pid})

    def wait(self) -> int:
        """The exit status: below zero a signal."""
        return int(self.server._ask({"wait": self.pid}))


def _preload() -> None:
    import torch
    import torch.distributed  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    import megatron_ft.capture.cpu
    import megatron_ft.capture.manager  # noqa: F401

    # Making an optimizer imports as much again as torch itself.
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _preload()
    # Objects that nobody collects stay shared with the children.
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
    children: dict[int, _Child] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            child = _fork(request, answers.fileno())
            answer = child.process.pid
            children[answer] = child
        elif "go" in request:
            answer = children[request["go"]].go()
        else:
            answer = children.pop(request["wait"]).wait()
        print(json.dumps(answer), file=answers, flush=True)
    for child in children.values():
        child.process.kill()


@dataclass
class _Child:
    process: Any
    gate: int

    def go(self) -> None:
        # A byte, not the end of the pipe: children that were forked later hold its end as well.
        if self.gate >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.gate, b"x")
            os.close(self.gate)
            self.gate = -1

    def wait(self) -> int:
        self.go()
        self.process.join()
        return int(self.process.exitcode)


def _fork(request: dict[str, Any], answers: int) -> _Child:
    ready, tell = os.pipe()
    waiting, gate = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_become, args=(request, (answers, ready, gate), tell, waiting)
    )
    process.start()
    for descriptor in (tell, waiting):
        os.close(descriptor)
    os.read(ready, 1)
    os.close(ready)
    return _Child(process, gate)


def _become(request: dict[str, Any], others: tuple[int, ...], tell: int, gate: int) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (*others, log, null):
        os.close(descriptor)
    _show_environment(request["env"])
    sys.argv = request["argv"]
    os.close(tell)  # from here on it is found where a started process would be
    os.read(gate, 1)
    _customise()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _customise() -> None:
    """What ``site`` does for a started process: its search path, and its ``sitecustomize``."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    new = [folder for folder in given if folder not in sys.path]
    sys.path[:0] = new
    files = (Path(folder, "sitecustomize.py") for folder in new)
    first = next((file for file in files if file.is_file()), None)
    if first is not None:
        runpy.run_path(str(first), run_name="sitecustomize")


def _show_environment(variables: Mapping[str, str]) -> None:
    """Have these variables, for this process and for who reads /proc/PID/environ.

    The kernel shows the memory in which a process got its first variables (proc(5), stat,
    fields 50 and 51), so that is where they are written.
    """
    os.environ.clear()  # nothing points into that memory any more
    text = Path("/proc/self/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    start, end = int(fields[47]), int(fields[48])
    packed = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    assert len(packed) <= end - start, f"{len(packed)} bytes of variables: raise ROOM_BYTES"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, packed, len(packed))
    os.environ.update(variables)


if __name__ == "__main__":
    _serve()
