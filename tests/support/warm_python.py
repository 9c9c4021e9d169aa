"""Processes that run a Python script or module without waiting for its imports.

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
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOM_VARIABLE = "TEST_WARM_PYTHON_ROOM"
ROOM_BYTES = 100_000
"""The server starts with an environment of this size, so that any other fits into its place."""

TRAINING = ("torch", "torch.distributed", "torch.nn.parallel", "megatron_ft.trainer.manager")
CHAOS = (
    *("torch", "torch.distributed"),
    *("megatron_ft.trainer.manager", "megatron_ft.trainer.cpu", "megatron_ft.trainer.state"),
    *("megatron_ft.supervisor.supervisor", "megatron_ft.cli.chaos.trace"),
    *("megatron_ft.checkpoint.drain", "megatron_ft.checkpoint.load"),
    "megatron_ft.checkpoint.export_drained",
)
"""Modules that every process of a chaos job needs."""

_REQUEST_SECONDS = 30.0


class WarmPython:
    """A server, and the end of it that starts processes.  It ends with ``close``, or with us."""

    def __init__(self, modules: Sequence[str] = TRAINING) -> None:
        """Start a server that has imported ``modules``."""
        self._folder = tempfile.mkdtemp(prefix="mft-warm-")
        self.path = str(Path(self._folder, "sock"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", ROOM_VARIABLE: "x" * ROOM_BYTES}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_python", self.path, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the server ended at its start"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, namespace: str = ""
    ) -> WarmChild:
        """See ``start_at``."""
        return start_at(self.path, argv, env, log, namespace=namespace)

    def close(self) -> None:
        """End the server and what it started."""
        self._process.communicate(timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)


def start_at(
    server: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    stdin: bytes = b"",
    namespace: str = "",
) -> WarmChild:
    """A process that will run a script with its arguments, or "-m", a module and those.

    It leads a new session, is there at once, and begins when it is let ``go``; output is
    appended to ``log``.  ``namespace`` is a file that stands for the network that it is to have.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    request = {
        "argv": list(argv),
        "env": dict(env),
        "log": str(log),
        "stdin": stdin.decode(),
        "net": namespace,
    }
    return WarmChild(int(_ask(server, request)), server)


@dataclass(frozen=True)
class WarmChild:
    """What launchers.process needs of its child: subprocess.Popen's ``pid`` and ``wait``."""

    pid: int
    server: str

    def go(self) -> None:
        """Let it begin; nothing happens if it has ended."""
        _ask(self.server, {"go": self.pid})

    def wait(self) -> int:
        """The exit status: below zero a signal."""
        self.go()
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            os.close(pidfd)
        return int(_ask(self.server, {"wait": self.pid}))


def _ask(server: str, request: Mapping[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_REQUEST_SECONDS)
        connection.connect(server)
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        answer = _read_all(connection)
    assert answer, f"the server at {server} did not answer {sorted(request)}"
    return json.loads(answer)


def _read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        # Making an optimizer imports as much again as torch itself.
        torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def _serve(path: str, modules: Sequence[str]) -> None:
    """Answer until our starter closes our input."""
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _preload(modules)
    # Objects that nobody collects stay shared with the children.
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
    children: dict[int, _Child] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", file=ready, flush=True)
        ready.close()
        while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
            connection, _ = listener.accept()
            # Who asks may be killed while it asks; the others still need an answer.
            with connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connection.settimeout(_REQUEST_SECONDS)
                request = json.loads(_read_all(connection))
                connection.sendall(json.dumps(_answer(request, children)).encode())
    for child in children.values():
        if child.status is None:
            child.process.kill()


def _answer(request: dict[str, Any], children: dict[int, _Child]) -> Any:
    if "argv" in request:
        for child in children.values():
            child.reap()
        child = _fork(request)
        children[child.process.pid] = child
        return child.process.pid
    if "go" in request:
        child = children[request["go"]]
        child.go()
        return True
    return children.pop(request["wait"]).wait()


def _close_all_but(*kept: int) -> None:
    """Descriptors that this process was forked with."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


@dataclass
class _Child:
    process: Any
    gate: int
    status: int | None = None

    def go(self) -> None:
        # A byte, not the end of the pipe: children that were forked later hold its end as well.
        if self.gate >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.gate, b"x")
            os.close(self.gate)
            self.gate = -1

    def wait(self) -> int:
        if self.status is None:
            self.process.join()
            self.reap()
        assert self.status is not None
        return self.status

    def reap(self) -> None:
        """Keep no descriptors of a child that has ended, though nobody may ever ask for it."""
        if self.status is None and self.process.exitcode is not None:
            self.status = int(self.process.exitcode)
            self.process.close()
            if self.gate >= 0:
                os.close(self.gate)
                self.gate = -1


def _fork(request: dict[str, Any]) -> _Child:
    ready, tell = os.pipe()
    waiting, gate = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_become, args=(request, tell, waiting)
    )
    process.start()
    for descriptor in (tell, waiting):
        os.close(descriptor)
    os.read(ready, 1)
    os.close(ready)
    return _Child(process, gate)


def _become(request: dict[str, Any], tell: int, gate: int) -> None:
    os.setsid()
    _close_all_but(tell, gate)
    if request["net"]:
        enter_namespace(request["net"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    given, give = os.pipe()
    os.write(give, request["stdin"].encode())
    for source, target in ((given, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (log, given, give):
        os.close(descriptor)
    # multiprocessing has put another file there; what is run may read its input.
    sys.stdin = os.fdopen(0)
    _show_environment(request["env"])
    os.close(tell)  # from here on it is found where a started process would be
    os.read(gate, 1)
    os.close(gate)
    _customise()
    _run(request["argv"])


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def enter_namespace(path: str) -> None:
    """Move this thread, and what it starts, into a network namespace (setns(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to {path}")
    finally:
        os.close(descriptor)


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
    _serve(sys.argv[1], sys.argv[2:])
