"""Equipment of chaos jobs in a checkout: all processes are forked from one trainer host.

``python -m tests.support.chaos_cluster ARGS`` is `megatron-ft chaos ARGS` with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.cli.chaos import command
from megatron_ft.cli.chaos.job import (
    ROLE,
    TRAINING_MODULE,
    ChaosCluster,
    JobFile,
    role_of_command,
)
from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.slurm.allocation import is_away
from megatron_ft.launchers.world import WorldProcess
from tests.support.warm_host import WarmHost, warm

CLUSTER_CLASS = "tests.support.chaos_cluster:EquippedCluster"
SOAK_CLUSTER = "tests.support.chaos_cluster:SoakCluster"

AWAY_NAME = "scheduler-away"
"""While the job's folder has a file of this name, its scheduler starts nothing."""
AWAY_TEXT = "srun: error: Unable to confirm allocation: Unable to contact slurm controller"
AWAY = ("/bin/sh", "-c", f"echo '{AWAY_TEXT}' >&2; exit 1")


class EquippedCluster(ChaosCluster):
    """A cluster whose processes are forked from the host at ``job.warm``, if there is one.

    It fails as Slurm's launcher does while the controller is away: each srun ends at once.
    """

    def __init__(self, job: JobFile) -> None:
        super().__init__(job)
        self._warm = job.warm
        self._trains_warm = job.command[1:3] == ("-m", TRAINING_MODULE)
        self._supervisor_warm = job.warm
        self._away = job.place / AWAY_NAME

    def check_world(self, ranks: int) -> None:
        """Fail while the scheduler is away; a caller that runs many cases has tried MPI once."""
        if self._away.exists():
            raise MissingEnvironmentError(f"there is no MPI world: {AWAY_TEXT}")

    def is_away(self, text: str) -> bool:
        """True if a failure is the scheduler's; see Launcher."""
        return is_away(text)

    def leaving(self) -> dict[str, str] | None:
        """No node leaves; nobody says so while the scheduler is away."""
        return None if self._away.exists() else {}

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        """Start a world; see Launcher."""
        if self._away.exists():
            placements = [Placement(*one)._replace(argv=AWAY) for one in placements]
        return super().start_world(placements, log_path)

    def forks(self, role: str) -> bool:
        """Whether processes in a role are forked."""
        return bool(self._warm) and (role != "trainer" or self._trains_warm)

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
        if self._away.exists():
            return super().start(node, AWAY, env, log_path, stdin)
        if not self.forks(role):
            return super().start(node, argv, env, log_path, stdin)
        words = list(argv)
        python = words.index(sys.executable)
        words[python:] = warm(self._warm, words[python + 1 :])
        # The base class finds the role in a command that was not changed.
        return super(ChaosCluster, self).start(node, words, {**env, ROLE: role}, log_path, stdin)

    def start_supervisor(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> LocalProcess:
        """Start or fork the supervisor."""
        words = warm(self._supervisor_warm, argv[1:]) if self._supervisor_warm else argv
        return super().start_supervisor(words, env, log_path)


class SoakCluster(EquippedCluster):
    """A cluster of which only trainers are forked: SMPs are measured as a user has them."""

    def __init__(self, job: JobFile) -> None:
        super().__init__(job)
        self._supervisor_warm = ""

    def forks(self, role: str) -> bool:
        """Whether processes in a role are forked."""
        return role == "trainer" and super().forks(role)


def main(arguments: Sequence[str]) -> int:
    """Run ``megatron-ft chaos`` with this equipment."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos_cluster")
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    server = WarmHost()
    try:
        return command.main(options, CLUSTER_CLASS, server.path)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
