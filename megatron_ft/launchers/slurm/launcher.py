"""The Launcher for nodes of a Slurm allocation; the supervisor runs in its batch script.

Each process is a job step of its own, with srun as its handle: srun runs beside the supervisor in a
session of its own, so that a later supervisor of the same batch script finds it by its process
number.  The step writes its log itself and would continue without srun (seen with Slurm 22.05).

The daemons of an MPI world are job steps too; mpirun itself runs beside the supervisor.  It calls
``python -m megatron_ft.launchers.slurm.launcher NODE WORDS...`` where it would call ssh; the words
are for a shell on that node.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.launchers.launcher import Launcher, ProcessGoneError
from megatron_ft.launchers.launcher_env import STEP_PLACES, outside_of_steps
from megatron_ft.launchers.mpirun import MpiLauncher, daemons_by
from megatron_ft.launchers.process import LocalProcess, open_session
from megatron_ft.launchers.slurm.allocation import Allocation, is_away, is_over
from megatron_ft.launchers.world import IN_FOLDER, Spread, WorldProcess

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


END_SECONDS = 4.0
"""Limit for srun to end a step before it is given up; a lost node never answers it."""

_SCRIPT = '(umask 077; : >>"$0"); exec "$@" >>"$0" 2>&1'


class StepProcess(LocalProcess):
    """Handle of a step with one task on ``node``; see ProcessHandle.

    Its process number is that of srun.  A status is the task's own; where the node was lost,
    of which srun makes a 0, it is that of SIGKILL.
    """

    def __init__(
        self,
        allocation: Allocation,
        node: str,
        pid: int,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(node, pid, child)
        self._allocation = allocation

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
        # Asked anew: an answer from before the loss would make a finished task of a lost one.
        return task_status(status, self.node in self._allocation.left(fresh=status == 0))


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


_POLL_SECONDS = 0.05


def reach_by_steps(
    mpi: MpiLauncher, jobs: Mapping[str, str], job_dir: Path, flags: Sequence[str], notes: Path
) -> dict[str, str]:
    """Settings by which ``mpi`` starts its daemons as job steps.

    ``jobs`` has the number of the Slurm job of each node, ``notes`` is a folder of ours.
    Slurm's configuration is named, because mpirun must not see that it is in a job.
    """
    conf = os.environ.get("SLURM_CONF")
    prefix = ["env", f"SLURM_CONF={conf}"] if conf else []
    return {
        **daemons_by(mpi, "megatron_ft.launchers.slurm.launcher", notes),
        SRUN: json.dumps([*prefix, *step_prefix(flags)]),
        JOBS: json.dumps(dict(jobs)),
        FOLDER: str(job_dir),
    }


class StepWorld(WorldProcess):
    """Handle of such a world: when it is over, so are its steps."""

    def kill(self) -> None:
        """End mpirun, and every step of the world by its srun; see StepProcess.kill."""
        # First, as mpirun calls the end of all its sruns a success.
        self._send(signal.SIGKILL)
        for pid in self._sruns():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        # Now, as the supervisor may end before the timer does: ranks of this very node.
        procfs.close_all(procfs.signal_matching(self._is_rank))
        timer = threading.Timer(END_SECONDS, super().kill)
        timer.daemon = True
        timer.start()

    def _clear(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while any(True for _ in self._sruns()) and time.monotonic() < deadline:
            # They are children of mpirun, which has ended: nothing would tell us.
            time.sleep(_POLL_SECONDS)
        super()._clear()

    def _is_rank(self, pid: int) -> bool:
        return self._is_member(pid) and not _is_srun(pid)

    def _sruns(self) -> Iterator[int]:
        return (pid for pid in procfs.own_processes() if self._is_member(pid) and _is_srun(pid))


def _is_srun(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "srun"
    except OSError:
        return False


CLEAN_SECONDS = 30.0


class SlurmLauncher(Launcher):
    """Starts every process as a job step of its own; see Launcher.

    ``shared_dir`` is a folder that all nodes see.  ``flags`` are given to each srun.
    """

    world_kind = StepWorld

    def __init__(
        self,
        job: str,
        allocation: Allocation,
        root: Path,
        shared_dir: Path,
        flags: Sequence[str] = (),
    ) -> None:
        super().__init__(job, root)
        self.allocation = allocation
        self._shared, self._flags = shared_dir.absolute(), tuple(flags)

    def nodes(self) -> list[str]:
        """All nodes that the allocation began with, in Slurm's order; then hosts that came."""
        return list(self.allocation.names)

    def reachable(self, node: str) -> bool:
        """True if Slurm still counts the node to the job."""
        return node in self.allocation.left()

    def is_away(self, text: str) -> bool:
        """True for what Slurm's own commands say while its controller is away; see Launcher."""
        return is_away(text)

    def is_over(self, text: str) -> bool:
        """True for what srun says once the Slurm job was cancelled; see Launcher."""
        return is_over(text)

    def leaving(self) -> dict[str, str] | None:
        """The nodes that Slurm drains, as an administrator has asked; see Launcher."""
        return self.allocation.draining()

    def drain_command(self, node: str, reason: str) -> str:
        words = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
        return shlex.join(words)

    def ready_file(self, node: str) -> Path:
        """The file in which the SMP of a node says that it serves, in the shared folder."""
        return self._shared / f"smp-{node}.json"

    def address(self, node: str) -> str:
        return self.allocation.address(node)

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> StepProcess:
        self._require([node])
        given, log = self._marked(node, env), log_path.absolute()
        job_id = self.allocation.job_of(node)
        command = step_command(job_id, node, argv, log, self._flags)
        child = open_session(node, command, outside_of_steps(given), log, stdin)
        return StepProcess(self.allocation, node, child.pid, child)

    def attach(self, node: str, pid: int, start_time: int | None = None) -> StepProcess:
        self._require([node])
        process = StepProcess(self.allocation, node, pid)
        process.require_start(start_time)
        env = procfs.read_environment(pid)
        if (env.get(JOB), env.get(NODE)) != (self.job, node):
            raise ProcessGoneError(f"process {pid} is not one of job {self.job}, node {node}")
        return process

    def clean(self) -> None:
        """Remove the job's folder on all nodes that are left; the job is over.

        Replacement hosts do so themselves when their jobs end.
        """
        ours = self.allocation.job_id
        left = sorted(n for n in self.allocation.left() if self.allocation.job_of(n) == ours)
        command = [*step_prefix(self._flags), f"--jobid={ours}"]
        command += [f"--nodelist={','.join(left)}"]
        command += [f"--nodes={len(left)}", f"--ntasks={len(left)}", "--output=none"]
        command += ["rm", "-rf", str(self.job_dir)]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=CLEAN_SECONDS, check=False)
        shutil.rmtree(self._shared, ignore_errors=True)

    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread:
        jobs = {node: self.allocation.job_of(node) for node in nodes}
        settings = reach_by_steps(self.mpi(), jobs, self.job_dir, self._flags, self._shared)
        # MPICH's proxies call mpirun, which is where the batch script is.
        here = os.environ.get("SLURMD_NODENAME", "")
        address = self.allocation.address(here) if here in self.allocation.names else ""
        return Spread(nodes, address, settings)


def main() -> None:
    """Become srun."""
    # Flags of ssh come before the node, as MPICH's -x.
    node, *words = itertools.dropwhile(lambda word: word.startswith("-"), sys.argv[1:])
    command = remote_command(node, words)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
