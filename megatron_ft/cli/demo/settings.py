"""What the demo runs: the job, its training command and the folders it writes to.

Which faults strike, whom and when: a pure function of a seed.

What happened while the protected run went on, as noted at the time.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from megatron_ft.cli.demo.frameworks import Framework, MegatronCore
from megatron_ft.config import SnapshotConfig
from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.plan import Sizes
from megatron_ft.supervisor.spec import JobSpec


class FaultKind(Enum):
    """What is killed."""

    TRAINER = "trainer"
    NODE = "node"
    TRAINER_AND_ENCODER = "trainer and encoder"


@dataclass(frozen=True)
class Fault:
    """One fault.

    It strikes once rank 0 has finished ``iteration`` and a further ``fraction`` of an
    iteration's time has passed, and not before the present incarnation has a protected commit.
    ``positions`` are places in the list of active nodes, ``local_rank`` a trainer there.
    """

    kind: FaultKind
    iteration: int
    fraction: float
    positions: tuple[int, ...]
    local_rank: int = 0


# Shares of all iterations within which each fault strikes.  Far enough apart that an incarnation
# trains and commits in between, and the last one early enough that the job goes on for a while
# after it.
_WINDOWS = ((0.20, 0.30), (0.45, 0.55), (0.70, 0.80))
_KINDS = (FaultKind.TRAINER, FaultKind.NODE, FaultKind.TRAINER_AND_ENCODER)


def plan_faults(
    seed: int, iterations: int, nodes: int, ranks_per_node: int = 1, lose: int = 1
) -> tuple[Fault, ...]:
    """The demo's three faults: a trainer, then ``lose`` nodes at once, then trainer and encoder.

    The same arguments give the same faults on every machine.  ValueError if more nodes are
    to be lost than there are.
    """
    if not 1 <= lose <= nodes:
        raise ValueError(f"{lose} of {nodes} nodes cannot be lost")
    chance = random.Random(f"megatron-ft demo {seed}")
    faults = []
    for kind, (earliest, latest) in zip(_KINDS, _WINDOWS, strict=True):
        victims = lose if kind is FaultKind.NODE else 1
        faults.append(
            Fault(
                kind=kind,
                iteration=chance.randint(round(earliest * iterations), round(latest * iterations)),
                # Not at the very edges, where the next iteration's start hides the difference.
                fraction=round(chance.uniform(0.1, 0.9), 3),
                positions=tuple(sorted(chance.sample(range(nodes), victims))),
                local_rank=chance.randrange(ranks_per_node),
            )
        )
    return tuple(faults)


@dataclass(frozen=True)
class Strike:
    """One fault as it was carried out.  ``during`` is the iteration under way.

    ``victim`` names who was hit in few words, ``text`` is the sentence about it.
    """

    fault: Fault
    victim: str
    text: str
    incarnation: int
    during: int
    monotonic: float
    wall: float


@dataclass(frozen=True)
class Seen:
    """An event of the supervisor and the incarnation in which it was told."""

    event: JobEvent
    incarnation: int


@dataclass
class Record:
    """Everything noted while the protected run went on."""

    strikes: list[Strike] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    costs: list[m.CaptureCost] = field(default_factory=list)
    restored: list[tuple[int, m.Restored]] = field(default_factory=list)
    rebuilt: list[tuple[int, m.Rebuilt]] = field(default_factory=list)
    tensor_bytes: dict[str, int] = field(default_factory=dict)

    def note(self, event: JobEvent, incarnation: int) -> None:
        """An event of the supervisor, as it is told."""
        self.seen.append(Seen(event, incarnation))

    def hear(self, event: m.NodeEvent) -> None:
        """A message from an SMP; a listener of the coordinator."""
        body = event.body
        if isinstance(body, m.CaptureCost):
            self.costs.append(body)
        elif isinstance(body, m.Restored):
            self.restored.append((event.incarnation, body))
        elif isinstance(body, m.Rebuilt):
            self.rebuilt.append((event.incarnation, body))
        elif isinstance(body, m.Sealed):
            self.tensor_bytes[body.record.shard_id] = body.record.tensor_bytes

    def count(self, kind: str, **fields: object) -> int:
        """How many events of a kind there were with these fields."""
        wanted = fields.items()
        return sum(s.event.kind == kind and wanted <= s.event.fields.items() for s in self.seen)


def now() -> tuple[float, float]:
    """Monotonic and wall time of one moment."""
    return time.monotonic(), time.time()


FEWEST_ITERATIONS = 20
# Twelve processes on a few cores may all stand still for a while; deaths are noticed without it.
_LEASE_SECONDS = 30.0


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
        settings=SnapshotConfig(protect=str(settings.scheme), lease_seconds=_LEASE_SECONDS),
        sizes=Sizes(crc=isal.available()),
        log_dir=folders.logs / ("run" if snapshots else "uninterrupted"),
        environment=settings.framework.environment(trace),
    )
