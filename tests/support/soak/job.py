"""A soak's job as its supervisor's process: ``python -m tests.support.soak.job FILE``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.job import (
    EVENTS,
    ROLE,
    ChaosCluster,
    EventFile,
    JobFile,
    environment,
    role_of_command,
)
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import WORLD
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.supervisor import Supervisor

MODULE = "tests.support.soak.job"


class SoakCluster(ChaosCluster):
    """Only trainers are forked: what is measured of an SMP is what a user's has."""

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start or fork a process on a node; see Launcher."""
        role = role_of_command(argv)
        if role == "trainer":
            return super().start(node, argv, env, log_path, stdin)
        return VirtualCluster.start(self, node, argv, {**env, ROLE: role}, log_path, stdin)


def roles(job: str) -> list[tuple[str, int]]:
    """Role and number of every SMP, encoder and trainer of a job that runs."""
    found = []
    for pid in procfs.own_processes():
        variables = procfs.read_environment(pid)
        if variables.get(JOB) == job and NODE in variables:
            found.append(("encoder" if WORLD in variables else variables.get(ROLE, ""), pid))
    return found


class SoakFollower(Follower):
    """Follows a job whose supervisor is started once, by itself and with no point armed."""

    def start(self) -> None:
        """Start the supervisor."""
        argv = [sys.executable, "-m", MODULE, str(self._file)]
        log = self.job.place / "supervisor.log"
        self.process = LocalProcess.spawn("", argv, environment(self.job, armed=False), log)

    def over(self) -> str:
        """How the job ended, "" while it runs."""
        if self.process.alive():
            return ""
        self.process.join(0)
        self.read()
        last = self.events[-1]["kind"] if self.events else ""
        return "finished" if last == "ended" else "stopped"


def main(arguments: Sequence[str]) -> int:
    """Lead the job to its end.  Exit codes: 0 finished, 1 stopped by an error that was told."""
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=JobFile)
    events = EventFile(job.place / EVENTS)
    try:
        with JobState(job.place / "state" / job.name, job.name) as state:
            supervisor = Supervisor(job.spec(), SoakCluster(job), state)
            supervisor.observers.add(events)
            asyncio.run(supervisor.run())
    except MegatronFTError as error:
        events.tell("stopped", f"{type(error).__name__}: {error}", error=type(error).__name__)
        return 1
    events.tell("ended", "the job has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
