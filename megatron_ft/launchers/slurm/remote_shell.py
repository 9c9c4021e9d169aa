"""Stands in for ssh where mpirun starts its daemons: a job step on the node instead.

mpirun calls ``python -m megatron_ft.launchers.slurm.remote_shell NODE WORDS...``; the words are for
a shell on that node.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_ft.launchers.spread import IN_FOLDER

SRUN = "MEGATRON_FT_SRUN"
"""JSON: srun with its flags, up to the node."""

JOBS = "MEGATRON_FT_SLURM_JOBS"
"""JSON: the number of the job that each node belongs to."""

FOLDER = "MEGATRON_FT_JOB_DIR"
"""The job's folder on each node; MPI keeps its files in <folder>/<node>/mpi."""


def remote_command(
    node: str, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The step that runs ``words`` on ``node``.  Pure."""
    prefix: list[str] = json.loads(environment[SRUN])
    jobs: dict[str, str] = json.loads(environment[JOBS])
    folder = os.path.join(environment[FOLDER], node, "mpi")
    prefix += [f"--jobid={jobs[node]}", f"--nodelist={node}"]
    return [*prefix, "/bin/sh", "-c", IN_FOLDER, folder, " ".join(words)]


def main() -> None:
    """Become srun."""
    # Flags of ssh come before the node, as MPICH's -x.
    node, *words = itertools.dropwhile(lambda word: word.startswith("-"), sys.argv[1:])
    command = remote_command(node, words)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
