"""Processes that start in milliseconds: forked from one that has imported everything.

Importing torch and a framework takes five seconds of processor time in every process; a test
of four ranks would spend most of its time there.  The server imports once, starts no
thread, and forks the ranks of each run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0
"""How long the other ranks may still run once one has failed."""
STACKS_SECONDS = 10.0
"""A rank that hangs may wait for a processor before it writes its stacks."""


@dataclass(frozen=True)
class Request:
    """One run: ``ranks`` processes that call ``entry`` ("module:function") with ``argv``.

    ``port`` is where they meet, chosen by ``ForkServer.run``.
    """

    entry: str
    argv: list[str]
    ranks: int
    logs: str
    timeout_seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank, those that had to be killed for lack of progress, and the output."""

    codes: list[int]
    hung: list[int]
    seconds: float
    logs: str

    def output(self, rank: int) -> str:
        """What a rank wrote."""
        return Path(self.logs, f"rank{rank}.log").read_text(errors="replace")

    def story(self) -> str:
        """Who failed, and the last that each of these said."""
        bad = [rank for rank, code in enumerate(self.codes) if code]
        lines = [f"exit codes {self.codes}; hung: ranks {self.hung or 'none'}"]
        lines += [f"--- rank {rank}\n{self.output(rank)[-5000:]}" for rank in bad]
        return "\n".join(lines)


class ForkServer:
    """The tests' end: starts the server with ``preload`` imported, and asks it for runs."""

    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        here = Path(__file__).resolve()
        path = [str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
        joined = os.pathsep.join(filter(None, path))
        self._preload = preload
        # Ranks end without tidying up what libraries have put there.
        self._temporary = tempfile.mkdtemp(prefix="mft-ranks-")
        variables = {"PYTHONPATH": joined, "TMPDIR": self._temporary}
        self._environment = {**os.environ, **environment, **variables}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, self._preload],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def run(self, request: Request) -> Outcome:
        """Run to the end; each rank has ended when this returns.

        After anything else, as a test's time limit, the next run has a new server: this one's
        answer would be taken for that run's.
        """
        # Here only: the server itself may be asked to run another copy of the package.
        from megatron_ft.core.process_tools import free_port

        Path(request.logs).mkdir(parents=True, exist_ok=True)
        try:
            answer = self._ask(json.dumps(asdict(replace(request, port=free_port()))))
        except BaseException:
            self._process.kill()
            self._end()
            self._process = self._start()
            raise
        return Outcome(**json.loads(answer), logs=request.logs)

    def _ask(self, request: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the fork server ended with status {self._process.wait(10)}"
        return answer

    def close(self) -> None:
        """End the server; its children end with it."""
        self._end()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _serve(preload: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module(preload).preload()
    # Children write to what they collect: objects that nobody collects stay shared.
    gc.collect()
    gc.freeze()
    alone = threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
    # Importing torch starts OpenMP's threads unless the environment says that there is one.
    assert alone, f"{preload} left a thread, which forked ranks would lack: OMP_NUM_THREADS=1?"
    for line in sys.stdin:
        outcome = _run(Request(**json.loads(line)))
        del outcome["logs"]
        print(json.dumps(outcome), file=answers, flush=True)


def _run(request: Request) -> dict[str, object]:
    started, port = time.monotonic(), request.port
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {_fork(request, rank, port): rank for rank in range(request.ranks)}
    codes, hung = _await(ranks, started + request.timeout_seconds, Path(request.logs))
    return asdict(Outcome(codes, hung, round(time.monotonic() - started, 3), ""))


def _fork(request: Request, rank: int, port: int) -> int:
    pid = os.fork()
    if not pid:
        _child(request, rank, port)
    return pid


def _child(request: Request, rank: int, port: int) -> NoReturn:
    code = 1
    try:
        _become_rank(request, rank, port)
        module, _, function = request.entry.partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(request: Request, rank: int, port: int) -> None:
    import ctypes
    import faulthandler

    os.setpgid(0, 0)  # what it starts is ended with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(
        Path(request.logs, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # A rank that hangs is asked for its stacks before it is killed.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    ranks = str(request.ranks)
    os.environ.update(request.environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [request.entry, *request.argv]


def _await(ranks: dict[int, int], deadline: float, logs: Path) -> tuple[list[int], list[int]]:
    """Exit codes, and the ranks that were killed because they were still there at the deadline.

    Once a rank has failed the others wait for it in vain, so they get a short grace.
    """
    codes = [0] * len(ranks)
    handles = {os.pidfd_open(pid): pid for pid in ranks}
    killed: list[int] = []
    while handles:
        wait = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(list(handles), [], [], wait)
        if not ready:
            killed += _kill(handles.values(), ranks, logs)
            deadline = time.monotonic() + GRACE_SECONDS
        for handle in ready:
            pid = handles.pop(handle)
            os.close(handle)
            _end_group(pid)
            codes[ranks[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[ranks[pid]]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return codes, sorted(set(killed))


def _end_group(pid: int) -> None:
    """End what a rank has left behind; before it is reaped its number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _kill(pids: Iterable[int], ranks: dict[int, int], logs: Path) -> list[int]:
    alive = list(pids)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_SECONDS
    while not all(map(_has_stacks, (logs / f"rank{ranks[pid]}.log" for pid in alive))):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [ranks[pid] for pid in alive]


def _has_stacks(log: Path) -> bool:
    """Whether the outermost frame of the main thread is there, which is written last."""
    said = log.read_bytes() if log.exists() else b""
    return b"in <module>" in said.rpartition(b"(most recent call first)")[2]


if __name__ == "__main__":
    _serve(sys.argv[1])
