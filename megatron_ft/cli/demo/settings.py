"""Settings of a demo: the user's choices, the folders that it writes to, and the job it runs."""

from __future__ import annotations

import os
import sys
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from megatron_ft.cli.chaos.job import JobFile
from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.supervisor.orders import Sizes

FEWEST_ITERATIONS = 20
# Twelve processes on a few cores may all stand still for a while; deaths are noticed without it.
_LEASE_SECONDS = 30.0


class DemoFolders:
    """Folders that one demo writes to, below ``root``, which is new or empty at the start.

    ``logs`` has the output of every process, ``state`` the supervisor's notes (gone at the end),
    ``corpus`` the training text and what a framework makes of it; ``protected`` and ``oracle``
    have trace and final state of the run that faults hit and of the one without any.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.logs, self.state = root, root / "logs", root / "state"
        self.corpus, self.protected = root / "corpus", root / "run"
        self.oracle = root / "uninterrupted"


@dataclass(frozen=True, kw_only=True)
class Framework(ABC):
    """A training program and how the demo runs it; fields are the user's choices.

    Making one raises ConfigError or MissingEnvironmentError if it cannot be run.
    """

    name: ClassVar[str]
    """The word after ``--framework``."""

    samples: ClassVar[str]
    """The numbers by which a trace names samples, in the plural."""

    package: ClassVar[str]
    """The distribution whose version a report names."""

    pp: int = 1

    @property
    @abstractmethod
    def title(self) -> str:
        """The program, for people: ``Megatron-LM's loop``."""

    @property
    @abstractmethod
    def shape(self) -> str:
        """The layout of the model, for people: ``tp 2, pp 1``."""

    @property
    @abstractmethod
    def model_parallel(self) -> int:
        """Number of ranks that hold one copy of the model; the job has a multiple of it."""

    @abstractmethod
    def prepare(self, settings: DemoSettings, folders: DemoFolders) -> Path:
        """Write the training text and whatever else both runs read; the path of the text."""

    @abstractmethod
    def command(
        self, settings: DemoSettings, folders: DemoFolders, text: Path, trace: Path, snapshots: bool
    ) -> list[str]:
        """Python's arguments on each rank, with or without snapshots."""

    @abstractmethod
    def environment(self, trace: Path) -> dict[str, str]:
        """Variables for every rank, by which it also writes ``trace`` if not by its command."""

    def choices(self) -> dict[str, int | str]:
        """The user's choices by name, as plain values."""
        return {k: v if isinstance(v, int) else str(v) for k, v in asdict(self).items()}

    def versions(self) -> dict[str, str]:
        """Its package and that package's version, if it is installed."""
        with suppress(metadata.PackageNotFoundError):
            return {self.package: metadata.version(self.package)}
        return {}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The user's choices; ConfigError where they cannot be met.

    ``framework`` says what trains, and how its model is laid out over ranks.  ``lose`` is how
    many nodes the second fault takes at once.
    """

    framework: Framework
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


def job_name() -> str:
    """A name that no other job has; short, as Unix socket paths contain it."""
    return f"demo-{os.getpid()}-{uuid.uuid4().hex[:4]}"


def job_of(
    settings: DemoSettings, folders: DemoFolders, text: Path, name: str, *, snapshots: bool = True
) -> JobFile:
    """The job of the protected run, or with ``snapshots=False`` of the uninterrupted one."""
    trace = folders.protected if snapshots else folders.oracle
    words = settings.framework.command(settings, folders, text, trace, snapshots)
    return JobFile(
        name=name,
        folder=str(folders.root),
        command=(sys.executable, *words),
        nodes=settings.nodes,
        spares=settings.spares,
        protect=settings.protect,
        ranks_per_node=settings.ranks_per_node,
        block_bytes=Sizes().block_bytes,
        crc=isal.available(),
        snapshot_interval=settings.snapshot_interval,
        lease=_LEASE_SECONDS,
        node_prefix="node",
        costs=True,
        logs=f"logs/{'run' if snapshots else 'uninterrupted'}",
        trace=str(trace),
        environment=settings.framework.environment(trace),
    )
