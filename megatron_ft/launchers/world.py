"""One MPI world as one handle: when it is over, none of its ranks is left.

Where all ranks are on one machine, the listening sockets of the MPI launcher are taken off the
network.  PRRTE, Open MPI's launcher, binds them to all interfaces; no setting of its own changes
that (``create_listen`` in its ``oob_tcp_listener.c``), and it asks no secret of those who connect.
So each socket is borrowed and bound to the loopback device.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ControlPlaneError, MpiError
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.mpirun import (
    MpiKind,
    MpiLauncher,
    split_environments,
    world_command,
    world_environment,
)
from megatron_ft.launchers.process import LocalProcess, open_session

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
    ``settings`` are variables for the MPI launcher, which win over the user's.  ``entered`` makes
    its command one that runs where the supervisor is.  ``near`` says of a node whether a signal
    from there reaches it.
    """

    hosts: Sequence[str] = ()
    here: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    entered: Callable[[Sequence[str]], list[str]] = list
    near: Callable[[str], bool] = lambda node: True


LOOPBACK = b"lo\0"
LONGEST_SECONDS = 10.0
"""A launcher that does not listen by then is not looked at any more."""

_LOOK_SECONDS = 0.01
_PIDFD_GETFD = 438  # On all architectures of Linux but alpha; Python has no name for it.
_LISTENS = "0A"


def keep_to_loopback(pid: int) -> threading.Thread:
    """Bind what ``pid``, a child of this process, will listen on to loopback; in a thread.

    Without the right to (Linux before 5.7, some containers) everything stays as it is.
    """
    thread = threading.Thread(
        target=_keep, args=(pid, os.pidfd_open(pid)), name=f"listeners of {pid}", daemon=True
    )
    thread.start()
    return thread


def _keep(pid: int, pidfd: int) -> None:
    looks, after = int(LONGEST_SECONDS / _LOOK_SECONDS), 10
    try:
        # Sockets are made one right after the other: a few looks more after the first.
        while looks > 0 and after > 0 and not procfs.ended(pidfd, _LOOK_SECONDS):
            looks -= 1
            with suppress(FileNotFoundError, ProcessLookupError):
                after -= bool(bind_all(pid, pidfd))
    except OSError:
        return  # Not allowed: see docs/security.md.
    finally:
        os.close(pidfd)


def bind_all(pid: int, pidfd: int) -> int:
    """Bind to loopback all that ``pid`` listens on at all interfaces; how many those are."""
    found = 0
    for number, inode in open_to_all(pid):
        with borrowed(pidfd, number) as listener:
            if os.fstat(listener.fileno()).st_ino == inode:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK)
                found += 1
    return found


def open_to_all(pid: int) -> Iterator[tuple[int, int]]:
    """Number and inode of each TCP socket on which a process listens at no address in particular.

    Also those that are bound to a device.
    """
    inodes = set(_listening(pid))
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            kind, _, inode = os.readlink(link).partition(":[")
            if kind == "socket" and int(inode[:-1]) in inodes:
                yield int(link.name), int(inode[:-1])


def borrowed(pidfd: int, number: int) -> socket.socket:
    """A descriptor of ours for another process's socket; PermissionError, or OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _listening(pid: int) -> Iterator[int]:
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # No IPv6.
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and not words[1].partition(":")[0].strip("0"):
                    yield int(words[9])


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
        self,
        child: subprocess.Popen[bytes],
        job: str,
        world: str,
        scratch: Path,
        near: Callable[[str], bool] = lambda node: True,
    ) -> None:
        """Take over the MPI launcher ``child`` of the world named ``world``.

        Ranks on nodes that are not ``near`` are left to the SMPs there.
        """
        super().__init__("", child.pid, child)
        self.job, self.world, self.scratch, self._near = job, world, scratch, near

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
        command = spread.entered(world_command(mpi, placements, own, spread.hosts, spread.here))
        child = open_session("", command, env, log_path)
        if mpi.kind is MpiKind.OPEN_MPI and not spread.hosts:
            keep_to_loopback(child.pid)
        return cls(child, job, world, scratch, spread.near)

    async def wait(self) -> int:
        """Exit status of the MPI launcher, once all ranks are dead too."""
        status = await super().wait()
        await asyncio.to_thread(self._clear)
        return status

    def join(self, timeout_seconds: float) -> int:
        """Do as ``wait`` without an event loop."""
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
        procfs.kill_matching(self._is_member, f"MPI world {self.world}")
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _is_member(self, pid: int) -> bool:
        env = procfs.read_environment(pid)
        if env.get(JOB) != self.job or env.get(WORLD) != self.world:
            return False
        return self._near(env.get(NODE, ""))


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
    if "slots" in said or "already filled" in said:
        hint = "MPI has too few slots; allow more with PRTE_MCA_rmaps_default_mapping_policy"
        hint += "=:oversubscribe, or take a scheme with fewer nodes"
    elif "ranks in the world: 1" in said:
        hint = f"{mpi.path} and mpi4py of {mpi.python} are of different MPIs"
    else:
        hint = "see what MPI says"
    return f"{mpi.kind.value} {mpi.version} gives no world of {ranks} ranks: {hint}: {said[:600]}"
