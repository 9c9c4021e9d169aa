"""Equipment of chaos jobs in a checkout: processes that are forked from one with all imports.

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
    python_words,
    role_of_command,
)
from megatron_ft.launchers.process import LocalProcess
from tests.support.warm_python import CHAOS, WarmPython, start_at

CLUSTER_CLASS = "tests.support.chaos_cluster:EquippedCluster"


class EquippedCluster(ChaosCluster):
    """A cluster whose processes are forked from the server at ``job.warm``, if there is one."""

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
        self._require([node])
        self.node_dir(node).mkdir(mode=0o700, exist_ok=True)
        words, marked = python_words(argv), self._marked(node, {**env, ROLE: role})
        child = start_at(self._warm, words, marked, log_path, stdin or b"")
        process = LocalProcess(node, child.pid, child)  # type: ignore[arg-type]
        self._end_if_lost([node], process)
        child.go()
        return process

    def start_supervisor(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> LocalProcess:
        """Start or fork the supervisor."""
        if not self._supervisor_warm:
            return super().start_supervisor(argv, env, log_path)
        child = start_at(self._supervisor_warm, argv[1:], env, log_path)
        process = LocalProcess("", child.pid, child)  # type: ignore[arg-type]
        child.go()
        return process


def main(arguments: Sequence[str]) -> int:
    """Run ``megatron-ft chaos`` with this equipment."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos_cluster")
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    server = WarmPython(CHAOS)
    try:
        return command.main(options, CLUSTER_CLASS, server.path)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
