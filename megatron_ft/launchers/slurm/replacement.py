"""Replacement hosts from Slurm: each comes with a small job of its own, which only holds a node.

Slurm does not give a lost node back to a job, and lets a job grow only where the site allows
that (``permit_job_expansion``).  But a user's steps may run in any of the user's jobs, so a
host is an ordinary job that waits in the queue like any other and ends when ours does.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.launchers.outer_launcher import outside_of_steps
from megatron_ft.launchers.slurm.allocation import Allocation, ask

SUBMIT_SECONDS = 30.0

# Its node's memory goes with it.  Waiting in the background lets it hear scancel at once.
_SCRIPT = """\
trap exit TERM
trap 'rm -rf {folder}/"$SLURMD_NODENAME"' EXIT
while sleep 5 & wait $!; do
    case "$(squeue --noheader --jobs={job} --format=%T 2>&1)" in
        "" | *PENDING* | *COMPLET* | *Invalid*) exit ;;
    esac
done
"""


class ReplacementHosts:
    """The HostSource of a job in ``allocation`` whose arenas are in ``job_dir`` on each node.

    ``flags`` are the site's own for sbatch, as ``--gpus-per-node=8``.
    """

    def __init__(
        self, allocation: Allocation, job_dir: Path, flags: Sequence[str], seconds: float
    ) -> None:
        self.seconds = seconds
        self._allocation, self._folder, self._flags = allocation, job_dir, tuple(flags)

    def request(self, count: int) -> str:
        """Submit a job for each host; see HostSource.  ControlPlaneError with what sbatch said."""
        jobs = [self._submit() for _ in range(count)]
        return f"a host from Slurm job {', '.join(jobs)}"

    def arrived(self) -> list[str]:
        """See HostSource."""
        return self._allocation.look_for_hosts()

    def withdraw(self) -> None:
        """Cancel the jobs that still wait."""
        ask("scancel", "--me", "--state=PENDING", f"--name={self._allocation.host_job_name}")

    def end(self) -> None:
        """Cancel all of them: our job is done."""
        ask("scancel", "--me", f"--name={self._allocation.host_job_name}")

    def _submit(self) -> str:
        seconds = self._allocation.seconds_left()
        command = host_command(self._allocation, self._folder, seconds, self._flags, os.environ)
        try:
            done = subprocess.run(
                command, env=outside_of_steps(os.environ), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ControlPlaneError(f"sbatch failed: {error}") from error
        if done.returncode:
            raise ControlPlaneError(f"sbatch says: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]


def host_command(
    allocation: Allocation,
    job_dir: Path,
    seconds: float,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> list[str]:
    """sbatch for one host beside those of ``allocation``, for the ``seconds`` it has left.  Pure.

    Partition, account, QOS and reservation are the job's, as ``environment`` has them, unless
    ``flags`` say otherwise.
    """
    same = {
        flag: value
        for flag in ("partition", "account", "qos", "reservation")
        if (value := environment.get(f"SLURM_JOB_{flag.upper()}"))
    }
    limit = [f"--time={max(1, int(seconds // 60))}"] if seconds else []
    script = _SCRIPT.format(folder=shlex.quote(str(job_dir)), job=allocation.reference)
    return [
        "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue",
        f"--job-name={allocation.host_job_name}", "--output=/dev/null", "--chdir=/",
        f"--exclude={','.join(allocation.names)}", *limit,
        *(f"--{flag}={value}" for flag, value in same.items()), *flags, f"--wrap={script}",
    ]  # fmt: skip
