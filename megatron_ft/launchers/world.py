"""One MPI world as one handle: when it is over, none of its ranks is left."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ControlPlaneError, MpiError
from megatron_ft.launchers.mpirun import (
    MpiLauncher,
    split_environments,
    world_command,
    world_environment,
)
from megatron_ft.launchers.process import LocalProcess, Placement, open_session

# Files that killed ranks left of an earlier world would only take memory.
IN_FOLDER = (
    'rm -rf "$0" && (umask 077 && mkdir -p "$0") && export TMPDIR="$0" HOME="${HOME:-$0}" && '
    'exec /bin/sh -c "$1"'
)
"""Script of ``sh -c`` that takes a folder and words: runs them with MPI's files there.

Open MPI does not start without a HOME.
"""


@dataclass(frozen=True)
class Spread:
    """Settings of a world over several machines, or over namespaces that stand for them.

    ``hosts`` are the names or addresses by which MPI knows the nodes, in the order of the
    ranks; empty: this machine, which they reach at ``here`` (empty: by its host name).
    ``settings`` are variables for the MPI launcher, which win over the user's.  ``end`` ends the
    ranks of the world of this name that are on other machines.
    """

    hosts: Sequence[str] = ()
    here: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    end: Callable[[str], None] = lambda world: None


WORLD = "MEGATRON_FT_WORLD"
WORLD_NODES = "MEGATRON_FT_WORLD_NODES"

_PROBE = (
    "import sys; from mpi4py import MPI; "
    "size = MPI.COMM_WORLD.allreduce(1); "
    "print('ranks in the world:', size); sys.exit(size != int(sys.argv[1]))"
)


class WorldProcess(LocalProcess):
    """Handle of an MPI world; its process is the MPI launcher.

    A launcher that is killed leaves its ranks behind (seen with Open MPI), and ranks may
    have sessions of their own (MPICH): they are found by the world's name in their
    environment.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], job: str, world: str, scratch: Path, spread: Spread
    ) -> None:
        super().__init__("", child.pid, child)
        self.job, self.world, self.scratch, self._spread = job, world, scratch, spread

    @classmethod
    def start(
        cls,
        mpi: MpiLauncher,
        job: str,
        placements: Sequence[Placement],
        log_path: Path,
        scratch: Path,
        spread: Spread | None = None,
    ) -> WorldProcess:
        """Start a world; its name is MEGATRON_FT_WORLD of the placements, or a new one.

        ``scratch`` is made if it is not there, and removed when the world has ended.  Without
        ``spread`` all ranks are on this machine.
        """
        shared, own = split_environments([p.env for p in placements])
        world = shared.get(WORLD) or uuid.uuid4().hex
        scratch.mkdir(parents=True, mode=0o700, exist_ok=True)
        env = world_environment(mpi, shared, scratch, spread.settings if spread else None)
        env |= {JOB: job, WORLD: world, WORLD_NODES: ",".join(p.node for p in placements)}
        spread = spread or Spread()
        command = world_command(mpi, placements, own, spread.hosts, spread.here)
        child = open_session("", command, env, log_path)
        return cls(child, job, world, scratch, spread)

    async def wait(self) -> int:
        status = await super().wait()
        await asyncio.to_thread(self._clear)
        return status

    def join(self, timeout_seconds: float) -> int:
        status = super().join(timeout_seconds)
        self._clear()
        return status

    def kill(self) -> None:
        """SIGKILL to the MPI launcher and to all ranks, and what MPI kept in files is removed."""
        super().kill()
        procfs.close_all(procfs.signal_matching(self._is_member))
        # Also here, for callers that do not wait: shared memory of MPI is 16 MiB a rank.
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _clear(self) -> None:
        self._spread.end(self.world)
        procfs.kill_matching(self._is_member, f"MPI world {self.world}")
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _is_member(self, pid: int) -> bool:
        env = procfs.read_environment(pid)
        return env.get(JOB) == self.job and env.get(WORLD) == self.world


def probe_world(
    mpi: MpiLauncher,
    ranks: int,
    environment: Mapping[str, str],
    timeout_seconds: float = 60.0,
    nodes: Sequence[str] = (),
    spread: Spread | None = None,
) -> None:
    """Start a world of ``ranks`` and let it count itself.

    With ``spread``, as for WorldProcess, rank i is on ``nodes[i]``.  Raises MpiError, with what
    MPI said, when it does not start, does not end in time, or is smaller.
    """
    argv = (mpi.python, "-c", _PROBE, str(ranks))
    env = {n: v for n, v in environment.items() if n not in (JOB, NODE, NODE_DIR, WORLD)}
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as folder:
        log = Path(folder) / "log"
        placements = [Placement(node, argv, env) for node in nodes or [""] * ranks]
        scratch = Path(folder) / "scratch"
        world = WorldProcess.start(mpi, "probe", placements, log, scratch, spread)
        try:
            status = world.join(timeout_seconds)
        except ControlPlaneError as error:
            world.kill()
            world.join(timeout_seconds)
            said = _failure(mpi, ranks, log)
            raise MpiError(f"{said}: no end in {timeout_seconds:g} s") from error
        if status != 0:
            raise MpiError(f"{_failure(mpi, ranks, log)} (status {status})")


def _failure(mpi: MpiLauncher, ranks: int, log: Path) -> str:
    text = "".join(c if c.isprintable() else " " for c in log.read_text(errors="replace"))
    said = " ".join(text.replace("-" * 10, "").split())
    return (
        f"{mpi.kind.value} {mpi.version} ({mpi.path}) and mpi4py of {mpi.python} give no world of "
        f"{ranks} ranks: {said[:600]}"
    )
