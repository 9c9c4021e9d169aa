"""The job of a chaos case as its supervisor's process: ``python -m ...chaos.job JOB.json``.

It is `megatron-ft run` with events that are written to a file, and with processes that may be
forked from a server instead of being started.

Networks that can be cut, for chaos jobs on machines that can have them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.cli.chaos import trace
from megatron_ft.cli.chaos.warm_python import start_at
from megatron_ft.config import SnapshotConfig
from megatron_ft.core import fault_points
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.orders import Sizes
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Supervisor

NETWORK_MODULE = "megatron_ft.cli.chaos.node_network"


def missing() -> str:
    """Why no job can have a network of its own here; empty if it can."""
    try:
        return str(import_module(NETWORK_MODULE).unavailable())
    except ModuleNotFoundError:
        return "this release has no networks that can be cut"


def network_of(job: str, nodes: Sequence[str]) -> Any:
    """The job's network, which every process of it and its runner name alike."""
    return import_module(NETWORK_MODULE).NodeNetwork(job, nodes)


MODULE = "megatron_ft.cli.chaos.job"
EVENTS = "events.jsonl"
ROLE = "MEGATRON_FT_CHAOS_ROLE"
"""What a process of the job is: smp, drain or trainer; encoders have the name of their world."""


class JobFile(msgspec.Struct, frozen=True):
    """All that a supervisor of the job needs.

    ``warm`` is the server's socket, or empty; ``network`` gives each node one that can be cut.
    """

    name: str
    folder: str
    command: tuple[str, ...]
    nodes: int
    spares: int
    protect: str
    ranks_per_node: int = 1
    slots: int = 2
    snapshot_interval: int = 2
    drain_interval: int = 0
    exports: bool = False
    lease: float = 4.0
    warm: str = ""
    root: str = ""
    trace: str = ""
    network: bool = False
    transport: str = "auto"

    @property
    def place(self) -> Path:
        """The case's folder."""
        return Path(self.folder)

    @property
    def drain_dir(self) -> Path:
        """Where the job drains to, if it does."""
        return self.place / "disk"

    @property
    def state_dir(self) -> Path:
        """The supervisor's notes."""
        return self.place / "state" / self.name

    @property
    def node_names(self) -> list[str]:
        """All nodes; those after the first ``nodes`` are spares."""
        return [f"n{number}" for number in range(self.nodes + self.spares)]

    @property
    def parity(self) -> int:
        """Nodes of a stripe that may be lost."""
        return Scheme.parse(self.protect).parity_members

    def cluster(self) -> ChaosCluster:
        """The virtual cluster, for whoever wants to start or kill on it."""
        return ChaosCluster(self)

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
            settings=SnapshotConfig(
                protect=self.protect,
                slots=self.slots,
                lease_seconds=self.lease,
                drain_dir=self.drain_dir if self.drain_interval else None,
                drain_interval=self.drain_interval,
                drain_export_dir=self.place / "exports" if self.exports else None,
                transport=self.transport,
            ),
            sizes=Sizes(block_bytes=16384),
            log_dir=self.place / "logs",
            environment=environment,
        )


class ChaosCluster(VirtualCluster):
    """A virtual cluster whose processes say what they are, and may come from a warm server."""

    def __init__(self, job: JobFile) -> None:
        self.network: Any = network_of(job.name, job.node_names) if job.network else None
        root = Path(job.root) if job.root else None
        super().__init__(job.name, job.node_names, root, network=self.network)
        # What is forked would be in the server's network.
        self._warm = "" if job.network else job.warm
        self._trains_warm = job.command[1:3] == ("-m", TRAINING_MODULE)

    def check_world(self, ranks: int) -> None:
        """Whoever runs many cases has tried MPI once."""

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start or fork a process on a node; see Launcher."""
        role = role_of_command(argv)
        argv = [EXPORT_MODULE if word == OWN_EXPORT_MODULE else word for word in argv]
        env = {**env, ROLE: role}
        if not self._warm or (role == "trainer" and not self._trains_warm):
            return super().start(node, argv, env, log_path, stdin)
        self._require([node])
        self.node_dir(node).mkdir(mode=0o700, exist_ok=True)
        child = start_at(
            self._warm, python_words(argv), self._marked(node, env), log_path, stdin or b""
        )
        process = LocalProcess(node, child.pid, child)  # type: ignore[arg-type]
        self._end_if_lost([node], process)
        child.go()
        return process


OWN_EXPORT_MODULE = "megatron_ft.checkpoint.export_drained"
EXPORT_MODULE = "megatron_ft.cli.chaos.exporting"
"""Runs in the place of the former, for it knows the form of our own training."""

TRAINING_MODULE = "megatron_ft.cli.chaos.training"


def role_of_command(argv: Sequence[str]) -> str:
    """What a process of a job is, by the command that the supervisor starts it with."""
    words = python_words(argv)
    module = words[1] if words[:1] == ["-m"] else ""
    if module == "megatron_ft.smp":
        return "smp"
    return "drain" if module.startswith("megatron_ft.checkpoint.") else "trainer"


def python_words(argv: Sequence[str]) -> list[str]:
    """What Python is given; what starts it with another priority is left out."""
    words = list(argv)
    return words[words.index(sys.executable) + 1 :] if sys.executable in words else words[1:]


class EventFile:
    """Appends events so that whoever kills this process knows all that it told before."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, event: JobEvent) -> None:
        """Write one line."""
        line = {"at": event.monotonic, "kind": event.kind, "text": event.text, **event.fields}
        os.write(self._descriptor, json.dumps(line, default=str).encode() + b"\n")

    def tell(self, kind: str, text: str, **fields: object) -> None:
        """An event of our own."""
        self(JobEvent(kind, text, dict(fields), time.monotonic()))


def main(arguments: Sequence[str]) -> int:
    """Lead the job to its end.  Exit codes: 0 finished, 1 stopped by an error that was told."""
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=JobFile)
    events = EventFile(job.place / EVENTS)
    events.tell("supervisor", f"supervisor {os.getpid()} started", pid=os.getpid())
    try:
        with JobState(job.state_dir, job.name) as state:
            supervisor = Supervisor(job.spec(), job.cluster(), state)
            supervisor.observers.add(events)
            asyncio.run(supervisor.run())
    except MegatronFTError as error:
        events.tell("stopped", f"{type(error).__name__}: {error}", error=type(error).__name__)
        return 1
    except BaseException as error:
        events.tell("crashed", f"{type(error).__name__}: {error}", error=type(error).__name__)
        raise
    events.tell("ended", "the job has ended")
    return 0


def environment(job: JobFile, armed: bool) -> dict[str, str]:
    """The environment of the supervisor's process, which all others inherit."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_FT_")}
    return {**base, fault_points.VARIABLE: job.folder} if armed else base


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
