"""Jobs of ``megatron-ft run`` on nodes with agents, followed by what the supervisor prints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE, NODE_DIR
from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import EXAMPLE, ROOT, Result, WarmCluster, read_losses
from tests.support.warm_host import is_client

WAIT_SECONDS = 200.0


class AgentJob:
    """The plain PyTorch example; whoever makes it starts it and calls ``destroy``."""

    def __init__(self, folder: Path, iterations: int, iteration_seconds: float = 0.05) -> None:
        self.folder, self.name = folder, f"agents-{uuid.uuid4().hex[:8]}"
        self.losses, self.output = folder / "losses.jsonl", folder / "job.out"
        words = [EXAMPLE, "--iterations", iterations, "--losses", self.losses, "--width", 64]
        words += ["--iteration-seconds", iteration_seconds]
        self.script = list(map(str, words))
        self.training = [sys.executable, *self.script]
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *flags: str, training: Sequence[str] = ()) -> list[str]:
        """``megatron-ft run`` with what every test needs."""
        words = [sys.executable, "-m", "megatron_ft.cli.main", "run", "--job", self.name]
        words += ["--state-dir", str(self.folder / "state"), "--protect", "xor:2"]
        return [*words, "--lease-seconds", "4", *flags, "--", *(training or self.training)]

    def warm_command(self, *flags: str) -> list[str]:
        """The same with trainers that do not wait for torch to be imported."""
        return self.command("--trainer-per-node", *flags, training=WarmCluster.stub(*self.script))

    def begin(
        self, command: Sequence[str], more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one process that belongs to the job; its output is the job's."""
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until_printed(self, words: str, times: int = 1) -> None:
        """Wait for the words in the job's output, so many times."""
        self._until(f"{words!r}", lambda: self.text().count(words) >= times)

    def until_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has trained so far."""
        self._until(f"iteration {iteration}", lambda: iteration in self.result()[0])

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            over = all(process.poll() is not None for process in self.started)
            assert not over or condition(), f"no {what}: all has ended\n{self.story()}"
            assert time.monotonic() < deadline, f"no {what}\n{self.story()}"
            time.sleep(0.1)

    def end(self) -> list[int]:
        try:
            return [process.wait(WAIT_SECONDS) for process in self.started]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def smps(self) -> list[int]:
        return sorted(
            pid
            for pid in procfs.own_processes()
            if procfs.read_environment(pid).get(JOB) == self.name
            and b"megatron_ft.smp" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def trainer(self, rank: int) -> int:
        found = [
            pid
            for pid in procfs.own_processes()
            if (env := procfs.read_environment(pid)).get(JOB) == self.name
            and env.get("RANK") == str(rank)
            # What launchers around us started has a rank, too.
            and NODE_DIR in env
            # This one stands for a trainer that is forked.
            and not is_client(pid)
        ]
        assert len(found) == 1, (found, self.story())
        return found[0]

    def lose_node(self, node: str) -> None:
        """Everything on the node dies and its memory is gone.

        What started its agent is found by the marks that it was given.
        """
        procfs.kill_matching(lambda pid: self._is_of(pid, node), node)
        shutil.rmtree(default_root() / self.name / node, ignore_errors=True)

    def _is_of(self, pid: int, node: str) -> bool:
        env = procfs.read_environment(pid)
        return env.get(JOB) == self.name and env.get(NODE) == node

    def story(self) -> str:
        """For a test that failed: what the job and its processes printed."""
        logs = sorted((self.folder / "state").glob("*/logs/*"))
        ends = [f"== {log.name}\n{log.read_text(errors='replace')[-800:]}" for log in logs]
        return "\n".join([self.text(), *ends])

    def result(self) -> Result:
        return read_losses(self.losses) if self.losses.exists() else ({}, "")

    def destroy(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)
        procfs.kill_matching(
            lambda pid: procfs.read_environment(pid).get(JOB) == self.name, self.name
        )
        shutil.rmtree(default_root() / self.name, ignore_errors=True)
