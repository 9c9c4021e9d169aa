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
from megatron_ft.launchers.process import LocalProcess
from tests.support.warm_host import WarmHost, warm

CLUSTER_CLASS = "tests.support.chaos_cluster:EquippedCluster"


class EquippedCluster(ChaosCluster):
    """A cluster whose processes are forked from the host at ``job.warm``, if there is one."""

    def __init__(self, job: JobFile) -> None:
        super().__init__(job)
        self._warm = job.warm
        self._trains_warm = job.command[1:3] == ("-m", TRAINING_MODULE)
        self._supervisor_warm = job.warm

    def check_world(self, ranks: int) -> None:
        """Whoever runs many cases has tried MPI once."""

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
