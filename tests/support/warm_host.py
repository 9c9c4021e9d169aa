"""The product's trainer host in tests: processes that start without waiting for their imports.

Importing torch and a framework takes up to five seconds of processor time, and the tests start
some hundreds of processes that need them.  One host serves many tests.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.core.process_tools import free_port
from megatron_ft.launchers import trainer_host, warm_client
from tests.programs import forked_rank, preloaded_host

ROOT = Path(__file__).parents[2]
ROOM_BYTES = 100_000
"""The host starts with an environment of this size, so that any other fits into its place."""
GRACE_SECONDS = 5.0
"""How long the other ranks may still run once one has failed."""
CALL_SECONDS = 120.0
STACKS_SECONDS = 10.0
"""A rank that hangs may wait for a processor before it writes its stacks."""


def warm(host: str, argv: Sequence[str]) -> list[str]:
    """The command that has the host at this socket fork ``python ARGV...``."""
    return [sys.executable, "-I", "-S", warm_client.__file__, host, sys.executable, *argv]


def python_words(argv: Sequence[str]) -> list[str]:
    """The arguments of Python in a command that may start it with another priority."""
    words = list(argv)
    return words[words.index(sys.executable) + 1 :] if sys.executable in words else words[1:]


def is_client(pid: int) -> bool:
    """Whether a process stands for one that was forked."""
    try:
        return b"warm_client.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True)
class Request:
    """One run: ``ranks`` processes that call ``entry`` ("module:function") with ``argv``."""

    entry: str
    argv: list[str]
    ranks: int
    logs: str
    timeout_seconds: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank, those that had to be killed for lack of progress, and the output."""

    codes: list[int]
    hung: list[int]
    seconds: float
    logs: str

    def output(self, rank: int) -> str:
        return _log(self.logs, rank).read_text(errors="replace")

    def story(self) -> str:
        """Who failed, and the last that each of these said."""
        bad = [rank for rank, code in enumerate(self.codes) if code]
        lines = [f"exit codes {self.codes}; hung: ranks {self.hung or 'none'}"]
        lines += [f"--- rank {rank}\n{self.output(rank)[-5000:]}" for rank in bad]
        return "\n".join(lines)


class WarmHost:
    """A trainer host that has called ``preload`` of a module.  It ends with ``close``, or with us.

    ``environment`` is what it and its ranks have beside ours.
    """

    def __init__(
        self,
        preload: str = "tests.programs.warm_modules",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Ranks end without tidying up what libraries have put there.
        self._folder = tempfile.mkdtemp(prefix="mft-warm-")
        self.path = str(Path(self._folder, "sock"))
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._given |= environment or {}
        files = [preloaded_host.__file__, trainer_host.__file__]
        self._process = subprocess.Popen(
            [sys.executable, *files, self.path, preload],
            env={**os.environ, **self._given, trainer_host.ROOM: "x" * ROOM_BYTES},
            stdin=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Fork ``python ARGV...``; the process that is returned ends as it does, and with it."""
        # Else it would start cold, with other modules than this host has.
        assert self._process.poll() is None, f"the host has ended: {self._process.returncode}"
        with log.open("wb") as output:
            return subprocess.Popen(
                warm(self.path, argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def run(self, request: Request) -> Outcome:
        """Run all ranks to the end; each has ended when this returns, or raises."""
        started = time.monotonic()
        Path(request.logs).mkdir(parents=True, exist_ok=True)
        port, ranks = free_port(), []
        try:
            for rank in range(request.ranks):
                place = _place(rank, request.ranks, port)
                given = {**os.environ, **self._given, "TMPDIR": self._folder}
                argv = [forked_rank.__file__, request.entry, *request.argv]
                environment = {**given, **request.environment, **place}
                ranks.append(self.start(argv, environment, _log(request.logs, rank)))
            hung = _await(ranks, started + request.timeout_seconds, request.logs)
        finally:
            for process in ranks:
                process.kill()
                process.wait(GRACE_SECONDS)
        codes = [process.returncode for process in ranks]
        return Outcome(codes, hung, round(time.monotonic() - started, 3), request.logs)

    def call(self, entry: str, folder: Path, *argv: str) -> None:
        """Call a function in one process; fails, with what it said, unless that succeeds."""
        outcome = self.run(Request(entry, list(argv), 1, str(folder / "logs"), CALL_SECONDS))
        assert not any(outcome.codes), outcome.story()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **meeting}


def _log(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def _await(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, logs: str) -> list[int]:
    """Wait for all ranks; those that were killed because they were still there at the deadline.

    Once a rank has failed the others wait for it in vain, so they get a short grace.
    """
    handles = {os.pidfd_open(process.pid): rank for rank, process in enumerate(ranks)}
    hung: set[int] = set()
    while handles:
        ready, _, _ = select.select(list(handles), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            hung |= set(handles.values())
            _kill([ranks[rank] for rank in hung], [_log(logs, rank) for rank in hung])
            deadline = time.monotonic() + GRACE_SECONDS
        for handle in ready:
            rank = handles.pop(handle)
            os.close(handle)
            if ranks[rank].wait():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return sorted(hung)


def _kill(ranks: Iterable[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """End ranks that hang, once they have written their stacks."""
    for process in ranks:
        process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_SECONDS
    while not all(map(_has_stacks, logs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in ranks:
        process.kill()


def _has_stacks(log: Path) -> bool:
    """Whether the outermost frame of the main thread is there, which is written last."""
    said = log.read_bytes() if log.exists() else b""
    return b"in <module>" in said.rpartition(b"(most recent call first)")[2]
