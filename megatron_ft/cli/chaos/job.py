"""The job of a fault run as its supervisor's process: ``python -m ...chaos.job JOB.json``.

It does what `megatron-ft run` does on a virtual cluster, and appends every event to a file.
The demo and chaos cases run their jobs this way, so that a supervisor can be killed like any
other process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos import trace
from megatron_ft.config import SnapshotConfig
from megatron_ft.core import fault_points
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.fault_plan import PLAN_NAME
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers import trainer_host
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.event_log import EVENTS, EventLog
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Stop, Supervisor

MODULE = "megatron_ft.cli.chaos.job"
TRAINING_MODULE = "megatron_ft.cli.chaos.training"
ROLE = "MEGATRON_FT_CHAOS_ROLE"
"""Role of a process of the job: smp, drain or trainer; encoders have the name of their world."""


class JobFile(msgspec.Struct, frozen=True):
    """All that a supervisor of the job needs.

    ``cluster_class`` names a subclass of ChaosCluster as ``module:name``; ``warm``, a server that
    forks processes, is for such a subclass.  With ``bare`` trainers get no variable of ours but
    the trace's.
    """

    name: str
    folder: str
    command: tuple[str, ...]
    nodes: int
    spares: int
    protect: str
    ranks_per_node: int = 1
    slots: int = 2
    block_bytes: int = 16384
    snapshot_interval: int = 2
    drain_interval: int = 0
    lease: float = 4.0
    root: str = ""
    node_prefix: str = "n"
    logs: str = "logs"
    trace: str = ""
    environment: dict[str, str] = {}
    transport: str = "auto"
    bare: bool = False
    warm_start: bool = False
    cluster_class: str = ""
    warm: str = ""

    @property
    def place(self) -> Path:
        """The job's folder."""
        return Path(self.folder)

    @property
    def drain_dir(self) -> Path:
        """The folder that the job drains to, if it does."""
        return self.place / "disk"

    @property
    def state_dir(self) -> Path:
        """The supervisor's notes."""
        return self.place / "state" / self.name

    @property
    def node_names(self) -> list[str]:
        """All nodes; those after the first ``nodes`` are spares."""
        return [f"{self.node_prefix}{number}" for number in range(self.nodes + self.spares)]

    @property
    def parity(self) -> int:
        """Nodes of a stripe that may be lost."""
        return Scheme.parse(self.protect).parity_members

    def cluster(self) -> ChaosCluster:
        """The virtual cluster; any process that makes it can start and kill on it."""
        if not self.cluster_class:
            return ChaosCluster(self)
        module, _, name = self.cluster_class.partition(":")
        made: ChaosCluster = getattr(import_module(module), name)(self)
        return made

    def spec(self) -> JobSpec:
        """The job itself."""
        environment = {
            "MEGATRON_FT_SNAPSHOT_INTERVAL": str(self.snapshot_interval),
            "OMP_NUM_THREADS": "1",
            trace.VARIABLE: self.trace,
        }
        return JobSpec(
            name=self.name,
            command=self.command,
            nodes=self.nodes,
            spares=self.spares,
            ranks_per_node=self.ranks_per_node,
            warm_start=self.warm_start,
            settings=SnapshotConfig(
                protect=self.protect,
                slots=self.slots,
                lease_seconds=self.lease,
                drain_dir=self.drain_dir if self.drain_interval else None,
                drain_interval=self.drain_interval,
                transport=self.transport,
            ),
            block_bytes=self.block_bytes,
            log_dir=self.place / self.logs,
            environment={**environment, **self.environment},
        )


@dataclass(frozen=True)
class ChaosSettings:
    """Settings that all cases of one command share.

    ``command`` is the user's own, or empty; ``limit`` how long a case may wait for any one
    thing, in seconds; ``cluster_class`` and ``warm`` are those of JobFile.
    """

    folder: Path
    nodes: int = 2
    protect: str = "xor:2"
    ranks_per_node: int = 1
    seed: int = 0
    lease: float = 4.0
    limit: float = 60.0
    iterations: int = 1000
    iteration_seconds: float = 0.03
    command: tuple[str, ...] = ()
    cluster_class: str = ""
    warm: str = ""

    @property
    def ranks(self) -> int:
        """Number of trainers."""
        return self.nodes * self.ranks_per_node

    def job(self, name: str, folder: Path, spares: int = 1) -> JobFile:
        """A job that trains without drains."""
        return JobFile(
            name=name,
            folder=str(folder),
            command=self.command or self.training(folder / "stop"),
            nodes=self.nodes,
            spares=spares,
            protect=self.protect,
            ranks_per_node=self.ranks_per_node,
            lease=self.lease,
            cluster_class=self.cluster_class,
            warm=self.warm,
            trace=str(folder / "trace"),
        )

    def training(self, stop: Path | None) -> tuple[str, ...]:
        """Our own training command."""
        command = [sys.executable, "-m", TRAINING_MODULE, "--iterations", str(self.iterations)]
        pace = ["--seconds", str(self.iteration_seconds), "--stop", str(stop)]
        return (*command, *(pace if stop else []))


class ChaosCluster(VirtualCluster):
    """A virtual cluster whose processes carry their role in their environment."""

    def __init__(self, job: JobFile) -> None:
        super().__init__(job.name, job.node_names, Path(job.root) if job.root else None)
        self._bare = job.bare

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start a process on a node; see Launcher."""
        marked = {**env, ROLE: role_of_command(argv)}
        return super().start(node, argv, marked, log_path, stdin)

    def start_supervisor(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> LocalProcess:
        """Start the supervisor of the job, which is on no node."""
        return LocalProcess.spawn("", argv, env, log_path)

    def _marked(self, node: str, env: Mapping[str, str]) -> dict[str, str]:
        marked = super()._marked(node, env)
        if not self._bare:
            return marked
        ours = [k for k in marked if k.startswith("MEGATRON_FT_") and k != trace.VARIABLE]
        return {k: v for k, v in marked.items() if k not in ours}


def role_of_command(argv: Sequence[str]) -> str:
    """The role of a process, by the command that the supervisor starts it with."""
    words = python_words(argv)
    module = words[1] if words[:1] == ["-m"] else ""
    if module == "megatron_ft.smp":
        return "smp"
    if words[:1] == [trainer_host.__file__]:
        return "host"
    return "drain" if module.startswith("megatron_ft.checkpoint.") else "trainer"


def python_words(argv: Sequence[str]) -> list[str]:
    """The arguments of Python in a command that may start it with another priority."""
    words = list(argv)
    return words[words.index(sys.executable) + 1 :] if sys.executable in words else words[1:]


def main(arguments: Sequence[str]) -> int:
    """Lead the job to its end.

    Exit codes: 0 finished, or left on SIGTERM with its memory kept; 1 stopped by an error that was
    recorded.
    """
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=JobFile)
    events = EventLog(job.place / EVENTS)
    started = f"supervisor {os.getpid()} started"
    events.record(JobEvent("supervisor", started, {"pid": os.getpid()}))
    try:
        with JobState(job.state_dir, job.name) as state:
            supervisor = Supervisor(job.spec(), job.cluster(), state)
            events.follow(supervisor.coordinator)
            asyncio.run(_run(supervisor))
    except asyncio.CancelledError:
        events.record(JobEvent("left", "the supervisor was asked to end; memory is kept"))
        return 0
    except BaseException as error:
        ours, name = isinstance(error, MegatronFTError), type(error).__name__
        kind = "stopped" if ours else "crashed"
        events.record(JobEvent(kind, f"{name}: {error}", {"error": name}))
        if ours:
            return 1
        raise
    events.record(JobEvent("ended", "the job has ended"))
    return 0


async def _run(supervisor: Supervisor) -> None:
    task = asyncio.ensure_future(supervisor.run())
    stop = Stop(supervisor, task)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.at_once)
    await task


def environment(job: JobFile) -> dict[str, str]:
    """The environment of the supervisor's process, which all others inherit."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_FT_")}
    planned = (job.place / PLAN_NAME).exists()
    return {**base, fault_points.VARIABLE: job.folder} if planned else base


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
