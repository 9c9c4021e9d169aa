"""An MPI world whose daemons are job steps; mpirun itself runs beside the supervisor."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.launchers.mpirun import MpiKind, MpiLauncher, mpich_by, open_mpi_by
from megatron_ft.launchers.slurm import remote_shell
from megatron_ft.launchers.slurm.step import END_SECONDS, step_prefix
from megatron_ft.launchers.world import WorldProcess

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
    command = [sys.executable, "-m", remote_shell.__name__]
    by = open_mpi_by(command)
    if mpi.kind is MpiKind.MPICH:
        by = mpich_by(command, notes / "remote-shell")
    return {
        **by,
        remote_shell.SRUN: json.dumps([*prefix, *step_prefix(flags)]),
        remote_shell.JOBS: json.dumps(dict(jobs)),
        remote_shell.FOLDER: str(job_dir),
    }


class StepWorld(WorldProcess):
    """Handle of such a world: when it is over, so are its steps."""

    def kill(self) -> None:
        """End mpirun, and every step of the world by its srun; see StepProcess.kill."""
        for pid in self._sruns():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._send(signal.SIGKILL)
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
