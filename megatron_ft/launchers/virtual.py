"""A cluster on one machine: nodes are sets of processes that can be lost as a whole.

Tests, the demo and users share it.  A node's processes carry the names of their job and
node in their environment, so any process of the user can find and end them; which
nodes are lost is a file, so every process sees the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core import private_files, procfs
from megatron_ft.core.environment import JOB, NODE, READY_NAME, check_names
from megatron_ft.core.errors import MissingEnvironmentError, UntrustedFileError
from megatron_ft.launchers.launcher import Launcher, NodeUnreachable, Placement, ProcessGoneError
from megatron_ft.launchers.mpirun import MpiLauncher
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.world import WORLD, WORLD_NODES, Spread, WorldProcess, probe_world

_END_SECONDS = 10.0
DEVICES = "CUDA_VISIBLE_DEVICES"


def default_root() -> Path:
    """The default folder of the nodes' memory: one of this user's on a tmpfs."""
    return Path(f"/dev/shm/megatron-ft-{os.geteuid()}")


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them."""
    if (named := environment.get(DEVICES)) is not None:
        return [name for name in named.split(",") if name]
    files = Path("/dev").glob("nvidia[0-9]*")
    return sorted((path.name.removeprefix("nvidia") for path in files), key=int)


class VirtualCluster(Launcher):
    """A Launcher whose nodes are groups of processes of this machine.

    Only processes of this user whose environment names exactly this job and node are ever
    touched.  A process that overwrites its own initial environment (as some programs do to
    change their title) is not found; processes of ours do not.
    """

    process_kind: type[LocalProcess] = LocalProcess
    knows_losses = True

    def __init__(
        self,
        job: str,
        node_names: Sequence[str],
        root: Path | None = None,
        mpi: MpiLauncher | None = None,
    ) -> None:
        """Describe the cluster; nothing is started.

        ``mpi`` is what ``start_world`` uses, found when first needed if None.  Raises ConfigError
        for names that cannot be folders or make socket paths too long, and
        MissingEnvironmentError when ``root`` is not a private folder of this user.
        """
        super().__init__(job, root or default_root(), mpi)
        self._names = list(node_names)
        check_names(self.root, job, self._names)
        # Made by hand, perhaps, with the user's usual mode; all that is below it is closed.
        _make_private(self.root, private_files.OTHERS_WRITE)
        _make_private(self.job_dir)

    def nodes(self) -> list[str]:
        """All nodes, lost ones included, in the order given."""
        return list(self._names)

    def reachable(self, node: str) -> bool:
        return not self._tombstone(node).exists()

    def gone(self, node: str) -> bool:
        """True if the node is lost: its processes were killed with it."""
        return not self.reachable(node)

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def devices(self, index: int, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
        """The node's part of this machine's GPUs, of which there may be too few: they wrap around.

        It follows from the node's place in the job, so a spare gets those of the lost node.
        """
        visible = visible_devices(environment)
        if len(visible) < ranks:
            return {}
        part = [visible[(index * ranks + local) % len(visible)] for local in range(ranks)]
        return {DEVICES: ",".join(part)}

    def ready_file(self, node: str) -> Path:
        """File in the node's memory, which is this machine's."""
        return self.node_dir(node) / READY_NAME

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        self._require([node])
        _make_private(self.node_dir(node))
        process = self.process_kind.spawn(node, argv, self._marked(node, env), log_path, stdin)
        self._end_if_lost([node], process)
        return process

    def attach(self, node: str, pid: int, start_time: int | None = None) -> LocalProcess:
        self._require([node])
        process = self.process_kind.attach(node, pid, start_time)
        if not self._is_of(pid, node):
            raise ProcessGoneError(
                f"process {pid} is not one of job {self.job}, node {node}: the one that was has "
                "ended and its number was given to another"
            )
        return process

    def check_world(self, ranks: int) -> None:
        probe_world(self.mpi(), ranks, os.environ)

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        world = super().start_world(placements, log_path)
        self._end_if_lost([Placement(*placement).node for placement in placements], world)
        return world

    def processes_of(self, node: str) -> list[int]:
        self.node_dir(node)
        return [pid for pid in procfs.own_processes() if self._is_of(pid, node)]

    def kill_node(self, node: str, *, keep_folder: bool = False) -> list[int]:
        """Lose a node: SIGKILL to all of it, and its memory is gone; returns whom it killed.

        ``keep_folder`` leaves the memory, as for a node that is cut off and comes back.
        Blocks until all are dead; ControlPlaneError if one cannot be killed in 10 s.
        """
        # First of all, so that whatever is being started finds it afterwards and ends itself.
        tombstone = self._tombstone(node)
        tombstone.parent.mkdir(mode=0o700, exist_ok=True)
        tombstone.touch(mode=0o600)
        worlds_hit: set[str] = set()
        killed = procfs.kill_matching(
            lambda pid: self._is_of(pid, node, worlds_hit), f"node {node}"
        )
        killed += self._kill_worlds_starting_on(node, worlds_hit)
        if not keep_folder:
            shutil.rmtree(self.node_dir(node), ignore_errors=True)
        return killed

    def revive(self, node: str) -> None:
        """A lost node returns, with what is left in its folder."""
        self._tombstone(node).unlink(missing_ok=True)

    def destroy(self) -> None:
        """End every process of the job, worlds included, and remove all its folders."""

        def belongs(pid: int) -> bool:
            env = procfs.read_environment(pid)
            return env.get(JOB) == self.job and (NODE in env or WORLD in env)

        procfs.kill_matching(belongs, f"job {self.job}")
        shutil.rmtree(self.job_dir, ignore_errors=True)

    def clean(self) -> None:
        """Remove all folders of a job that is done: small files of daemons that died stay there."""
        shutil.rmtree(self.job_dir, ignore_errors=True)

    def _tombstone(self, node: str) -> Path:
        return self.node_dir(node).parent / ".dead" / node

    def _is_of(self, pid: int, node: str, worlds: set[str] | None = None) -> bool:
        """True if a process is of this job and node; adds its world's name to ``worlds``."""
        env = procfs.read_environment(pid)
        mine = env.get(JOB) == self.job and env.get(NODE) == node
        if mine and worlds is not None:
            worlds.add(env.get(WORLD, ""))
        return mine

    def _kill_worlds_starting_on(self, node: str, worlds_hit: set[str]) -> list[int]:
        """End worlds of which no rank was found on the node: theirs was still to come."""

        def misses_its_rank(pid: int) -> bool:
            env = procfs.read_environment(pid)
            of_node = node in env.get(WORLD_NODES, "").split(",")
            return env.get(JOB) == self.job and of_node and env.get(WORLD) not in worlds_hit

        return procfs.kill_matching(misses_its_rank, f"worlds starting on {node}")

    def _spread(self, nodes: Sequence[str], scratch: Path) -> Spread | None:
        for node in nodes:
            _make_private(self.node_dir(node))
        return None

    def _end_if_lost(self, nodes: Sequence[str], process: LocalProcess) -> None:
        try:
            self._require(nodes)
        except NodeUnreachable:
            process.kill()
            process.join(_END_SECONDS)
            raise


def _make_private(folder: Path, forbidden: int = private_files.OTHERS) -> None:
    try:
        private_files.make_folder(folder, forbidden)
    except UntrustedFileError as error:
        raise MissingEnvironmentError(f"{error}; or choose another root folder") from error
    except OSError as error:
        raise MissingEnvironmentError(
            f"{folder} cannot be made ({error.strerror}): give an --arena-dir on a tmpfs that this "
            "user may write to"
        ) from error
