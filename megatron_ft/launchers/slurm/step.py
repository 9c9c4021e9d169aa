"""One process on one node, as a job step of its own.

srun is its handle: it runs beside the supervisor in a session of its own, so that a later
supervisor of the same batch script finds it by its process number.  The step writes its log
itself and would go on without srun (seen with Slurm 22.05).
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.launchers.outer_launcher import STEP_PLACES, outside_of_steps
from megatron_ft.launchers.process import LocalProcess, open_session
from megatron_ft.launchers.slurm.allocation import Allocation

END_SECONDS = 4.0
"""How long srun may take to end a step before it is given up; a lost node never answers it."""

_SCRIPT = '(umask 077; : >>"$0"); exec "$@" >>"$0" 2>&1'


class StepProcess(LocalProcess):
    """Handle of a step with one task on ``node``; see ProcessHandle.

    Its process number is that of srun.  A status is the task's own; where the node was lost,
    of which srun makes a 0, it is that of SIGKILL.
    """

    allocation: Allocation | None = None
    """Known once it is; a step that has ended by then cannot be attached to."""

    @classmethod
    def begin(
        cls,
        allocation: Allocation,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        flags: Sequence[str],
        stdin: bytes | None,
    ) -> StepProcess:
        """Start a step; ``flags`` are the site's own for srun."""
        command = step_command(allocation.job_of(node), node, argv, log_path, flags)
        child = open_session(node, command, outside_of_steps(env), log_path, stdin)
        return cls._of(allocation, node, child.pid, child)

    @classmethod
    def of_earlier(
        cls, allocation: Allocation, node: str, pid: int, start_time: int | None
    ) -> StepProcess:
        """The step of a supervisor that was here before; ProcessGoneError if it has ended."""
        process = cls.attach(node, pid, start_time)
        assert isinstance(process, StepProcess)
        process.allocation = allocation
        return process

    @classmethod
    def _of(
        cls, allocation: Allocation, node: str, pid: int, child: subprocess.Popen[bytes]
    ) -> StepProcess:
        process = cls(node, pid, child)
        process.allocation = allocation
        return process

    def kill(self) -> None:
        """Have Slurm send SIGKILL to all of the step; see ProcessHandle.

        srun does so at SIGTERM.  It is ended itself when it takes too long: what then still
        runs is on a node that cannot be reached, whose SMP ends it when its lease is over.
        """
        if not self._send(signal.SIGTERM):
            return
        timer = threading.Timer(END_SECONDS, super().kill)
        timer.daemon = True
        timer.start()

    def _status(self) -> int:
        status = super()._status()
        left = self.allocation is None or self.node in self.allocation.left()
        return task_status(status, left)


def task_status(status: int, node_left: bool) -> int:
    """A task's exit status from srun's, as ``subprocess`` has them.  Pure.

    srun gives 128 + n for a task killed by signal n, and 0 when the node has failed.
    """
    if 128 < status <= 128 + signal.NSIG:
        return 128 - status
    return -signal.SIGKILL if status == 0 and not node_left else status


def step_command(
    job_id: str, node: str, argv: Sequence[str], log_path: Path, flags: Sequence[str]
) -> list[str]:
    """The command of a step with one task, whose output goes to ``log_path`` on any node."""
    without_place = ["env", *(word for name in STEP_PLACES for word in ("-u", name))]
    task = ["/bin/sh", "-c", _SCRIPT, str(log_path), *without_place, *argv]
    return [*step_prefix(flags), f"--jobid={job_id}", f"--nodelist={node}", "--output=none", *task]


def step_prefix(flags: Sequence[str]) -> list[str]:
    """srun with what all our steps have in common: one task that shares its node with others.

    ``--no-kill`` and ``--kill-on-bad-exit=0`` keep what happens to one step from the others;
    ``--mem=0`` gives it all of the job's memory on the node.
    """
    return [
        "srun", "--nodes=1", "--ntasks=1", "--overlap", "--no-kill",
        "--kill-on-bad-exit=0", "--mem=0", "--mpi=none", "--quiet", *flags,
    ]  # fmt: skip
