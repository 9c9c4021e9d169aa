"""What the demo runs: the job, its training command and the folders it writes to."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.cli.demo.frameworks import Framework
from megatron_ft.cli.demo.frameworks.megatron import MegatronCore
from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.supervisor.plan import Sizes
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.timing import Timing

FEWEST_ITERATIONS = 20
# Twelve processes on a few cores may all stand still for a while; deaths are noticed without it.
_TIMING = Timing(lease=30.0, node_timeout=45.0)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The user's choices; ConfigError where they cannot be met.

    ``framework`` says what trains, and how its model is laid out over ranks.  ``lose`` is how
    many nodes the second fault takes at once.
    """

    framework: Framework = field(default_factory=MegatronCore)
    nodes: int = 4
    spares: int = 1
    ranks_per_node: int = 1
    protect: str = "rs:3+1"
    iterations: int = 40
    seed: int = 0
    lose: int = 1
    snapshot_interval: int = 2

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "lose", "snapshot_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number >= 1")
        if self.iterations < FEWEST_ITERATIONS:
            raise ConfigError(
                f"--iterations {self.iterations} leaves no room for three faults; give at least "
                f"{FEWEST_ITERATIONS}"
            )
        if self.lose > self.nodes:
            raise ConfigError(f"--lose {self.lose} is more than the {self.nodes} nodes that train")
        self._check_shape()

    def _check_shape(self) -> None:
        if self.world_size % self.framework.model_parallel:
            raise ConfigError(
                f"{self.world_size} ranks (--nodes {self.nodes} x --ranks-per-node "
                f"{self.ranks_per_node}) cannot be divided by {self.framework.model_parallel}, "
                f"which {self.framework.shape} makes of one copy of the model"
            )

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that train the same part of the model."""
        return self.world_size // self.framework.model_parallel

    @property
    def scheme(self) -> Scheme:
        """The redundancy scheme."""
        return Scheme.parse(self.protect)


@dataclass(frozen=True)
class Folders:
    """Where one demo keeps what it writes; ``root`` is new or empty at the start."""

    root: Path

    @property
    def logs(self) -> Path:
        """Output of every process."""
        return self.root / "logs"

    @property
    def events(self) -> Path:
        """One line for each event of the supervisor."""
        return self.root / "logs" / "events.log"

    @property
    def state(self) -> Path:
        """The supervisor's notes; gone at the end."""
        return self.root / "state"

    @property
    def corpus(self) -> Path:
        """The training text, and what a framework makes of it."""
        return self.root / "corpus"

    @property
    def protected(self) -> Path:
        """Trace and final state of the run that faults hit."""
        return self.root / "run"

    @property
    def oracle(self) -> Path:
        """Trace and final state of the run that nothing interrupts."""
        return self.root / "uninterrupted"


def job_name() -> str:
    """A name that no other job has; short, as Unix socket paths contain it."""
    return f"demo-{os.getpid()}-{uuid.uuid4().hex[:4]}"


def job_spec(
    settings: DemoSettings, folders: Folders, text: Path, name: str, *, snapshots: bool = True
) -> JobSpec:
    """The job of the protected run, or with ``snapshots=False`` of the uninterrupted one."""
    trace = folders.protected if snapshots else folders.oracle
    return JobSpec(
        name=name,
        command=settings.framework.command(settings, folders, text, trace, snapshots=snapshots),
        nodes=settings.nodes,
        spares=settings.spares,
        ranks_per_node=settings.ranks_per_node,
        scheme=settings.scheme,
        sizes=Sizes(crc=isal.available()),
        timing=_TIMING,
        log_dir=folders.logs / ("run" if snapshots else "uninterrupted"),
        environment=settings.framework.environment(trace),
    )
