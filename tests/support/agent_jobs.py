"""Jobs of ``megatron-ft run`` on nodes with agents, followed by what the supervisor prints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.launchers.virtual import default_root
from tests.support.jobs import ROOT, WarmCluster
from tests.support.printed_jobs import WAIT_SECONDS, PrintedJob


class AgentJob(PrintedJob):
    """The test that makes it starts it and calls ``destroy``."""

    def __init__(self, folder: Path, iterations: int, iteration_seconds: float = 0.05) -> None:
        super().__init__(folder, f"agents-{uuid.uuid4().hex[:8]}")
        self.script = self.example(iterations, iteration_seconds)
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

    def over(self) -> str:
        return "all has ended" if all(p.poll() is not None for p in self.started) else ""

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

    def lose_node(self, node: str) -> None:
        """Everything on the node dies and its memory is gone.

        What started its agent is found by the marks that it was given.
        """
        procfs.kill_matching(lambda pid: self._is_of(pid, node), node)
        shutil.rmtree(default_root() / self.name / node, ignore_errors=True)

    def _is_of(self, pid: int, node: str) -> bool:
        env = procfs.read_environment(pid)
        return env.get(JOB) == self.name and env.get(NODE) == node

    def destroy(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)
        procfs.kill_matching(
            lambda pid: procfs.read_environment(pid).get(JOB) == self.name, self.name
        )
        shutil.rmtree(default_root() / self.name, ignore_errors=True)
