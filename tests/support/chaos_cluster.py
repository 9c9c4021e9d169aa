"""Equipment of chaos jobs in a checkout: all processes are forked from one trainer host.

``python -m tests.support.chaos_cluster ARGS`` is `megatron-ft chaos ARGS` with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft.cli import main as cli
from megatron_ft.cli import run_place
from megatron_ft.cli.chaos import command
from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.slurm.allocation import is_away
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import WorldProcess
from tests.support.warm_host import WarmHost, warm

WARM, AWAY_FILE = "MFT_TEST_WARM", "MFT_TEST_AWAY"
"""Variables of a supervisor: the socket of the host, the file AWAY_NAME."""
MODULE = "tests.support.chaos_cluster"
AWAY_NAME = "scheduler-away"
"""While the job's folder has a file of this name, its scheduler starts nothing."""
AWAY_TEXT = "srun: error: Unable to confirm allocation: Unable to contact slurm controller"
AWAY = ("/bin/sh", "-c", f"echo '{AWAY_TEXT}' >&2; exit 1")


class EquippedCluster(VirtualCluster):
    """A cluster whose SMPs and drains are forked from the host at ``warm_path``, if there is one.

    It fails as Slurm's launcher does while the controller is away: each srun ends at once.
    """

    def __init__(self, *given: Any, warm_path: str = "", away: Path | None = None) -> None:
        super().__init__(*given)
        self._warm, self._away = warm_path, away or Path("/nonexistent")

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

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start or fork a process on a node; see Launcher."""
        words = list(argv)
        if self._away.exists():
            words = list(AWAY)
        elif self._warm and "RANK" not in env and sys.executable in words:
            python = words.index(sys.executable)
            words[python:] = warm(self._warm, words[python + 1 :])
        return super().start(node, words, env, log_path, stdin)


def forked_trainers(host: WarmHost) -> dict[str, Any]:
    """Fields of ChaosSettings with which the trainers of its jobs are forked."""
    return {"python": tuple(warm(host.path, ()))}


def equipment(host: WarmHost) -> dict[str, Any]:
    """The same, and SMPs, drains and the command itself are forked as well."""
    forked = forked_trainers(host)
    return {**forked, "program": ("env", f"{WARM}={host.path}", *forked["python"], "-m", MODULE)}


def main(arguments: Sequence[str]) -> int:
    """Run ``megatron-ft run`` on an EquippedCluster, or ``megatron-ft chaos`` with such jobs."""
    if arguments[0] == "run":
        away = Path(os.environ.get(AWAY_FILE, "/nonexistent"))
        made = partial(EquippedCluster, warm_path=os.environ.get(WARM, ""), away=away)
        setattr(run_place, "VirtualCluster", made)  # noqa: B010  # to mypy it is a class
        return cli.main(list(arguments))
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos_cluster")
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    host = WarmHost()
    try:
        return command.main(options, **equipment(host))
    finally:
        host.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
