"""Jobs of the plain PyTorch example that are followed by what their command prints."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE_DIR
from tests.support.jobs import EXAMPLE, Result, read_losses
from tests.support.warm_host import is_client

WAIT_SECONDS = 200.0


class PrintedJob(ABC):
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.losses, self.output = folder / "losses.jsonl", folder / "job.out"

    @abstractmethod
    def over(self) -> str:
        """How it has ended; empty while it runs."""

    def example(self, iterations: int, iteration_seconds: float) -> list[str]:
        words = [EXAMPLE, "--iterations", iterations, "--losses", self.losses, "--width", 64]
        return list(map(str, [*words, "--iteration-seconds", iteration_seconds]))

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def until_printed(self, words: str, times: int = 1) -> None:
        """Wait for the words in the job's output, this often."""
        self.until(f"{words!r} in the output", lambda: self.text().count(words) >= times)

    def until_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has trained so far."""
        self.until(f"iteration {iteration}", lambda: iteration in self.result()[0])

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            end = self.over()
            assert condition() or not end, f"no {what} ({end})\n{self.story()}"
            assert time.monotonic() < deadline, f"no {what}\n{self.story()}"
            time.sleep(0.2)  # neither a file nor Slurm tells of a change

    def trainer(self, rank: int) -> int:
        """Process number of a rank: of no launcher, and of no client that stands for it."""
        found = [pid for pid in procfs.own_processes() if self._is_trainer(pid, rank)]
        assert len(found) == 1, (found, self.story())
        return found[0]

    def _is_trainer(self, pid: int, rank: int) -> bool:
        env = procfs.read_environment(pid)
        ours = env.get(JOB) == self.name and env.get("RANK") == str(rank) and NODE_DIR in env
        if not ours or is_client(pid):
            return False
        with suppress(OSError):  # it has ended meanwhile
            return os.readlink(f"/proc/{pid}/exe") == os.path.realpath(sys.executable)
        return False

    def story(self) -> str:
        """For a test that failed: what the job and its processes printed."""
        logs = sorted((self.folder / "state").glob("*/logs/*"))
        ends = [f"== {log.name}\n{log.read_text(errors='replace')[-800:]}" for log in logs]
        return "\n".join([self.text(), *ends])

    def result(self) -> Result:
        return read_losses(self.losses) if self.losses.exists() else ({}, "")
