"""What the demo runs: the job, its training command and the folders it writes to."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_ft import isal
from megatron_ft.coordinator.coordinator import Timing
from megatron_ft.coordinator.plan import Sizes
from megatron_ft.erasure.scheme import Scheme
from megatron_ft.errors import ConfigError
from megatron_ft.launch.spec import JobSpec
from megatron_ft.testing import stock_script

FEWEST_ITERATIONS = 20
_HEADS = 4
_MICRO_BATCH = 2
_BLOCK_BYTES = 65536
# Twelve processes on a few cores may all stand still for a while; deaths are noticed without it.
_TIMING = Timing(lease=30.0, node_timeout=45.0)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The user's choices; ConfigError where they cannot be met.

    ``lose`` is how many nodes the second fault takes at once.  The data-parallel size is
    what ``nodes * ranks_per_node`` leaves after ``tp * pp``.  ``checkout`` is one of
    Megatron-LM, whose own ``pretrain_gpt.py`` trains; without it a program of this package
    does.
    """

    tp: int = 1
    pp: int = 1
    nodes: int = 4
    spares: int = 1
    ranks_per_node: int = 1
    protect: str = "rs:3+1"
    iterations: int = 40
    seed: int = 0
    lose: int = 1
    snapshot_interval: int = 2
    checkout: Path | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "nodes", "ranks_per_node", "lose", "snapshot_interval"):
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
        if _HEADS % self.tp:
            raise ConfigError(
                f"--tp {self.tp}: the demo's model has {_HEADS} heads; give 1, 2 or 4"
            )
        if self.world_size % (self.tp * self.pp):
            raise ConfigError(
                f"{self.world_size} ranks (--nodes {self.nodes} x --ranks-per-node "
                f"{self.ranks_per_node}) cannot be divided by --tp {self.tp} x --pp {self.pp}"
            )

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that train the same part of the model."""
        return self.world_size // (self.tp * self.pp)

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
        """The training text and Megatron's sample indices."""
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


def training_command(
    settings: DemoSettings, folders: Folders, corpus: Path, trace: Path, *, snapshots: bool
) -> tuple[str, ...]:
    """Megatron's training program with the demo's model, with or without snapshots."""
    from megatron_ft.testing.demo_model import demo_arguments

    flags = demo_arguments(
        tp=settings.tp,
        pp=settings.pp,
        iterations=settings.iterations,
        data_path=corpus,
        layers=2 * settings.pp,
        micro_batch=_MICRO_BATCH,
        # In a pipeline two micro-batches for each data-parallel rank, so that stages overlap.
        global_batch=_MICRO_BATCH * settings.data_parallel * (1 if settings.pp == 1 else 2),
        cache_path=folders.corpus / "indices",
    )
    if settings.checkout is None:
        program = ["-m", "megatron_ft.testing.pretrain_gpt", *flags, "--trace-dir", str(trace)]
    else:
        program = [str(settings.checkout / stock_script.SCRIPT), *flags]
    if snapshots:
        interval = str(settings.snapshot_interval)
        program += ["--inmem-snapshot", "--inmem-snapshot-interval", interval]
    return (sys.executable, *program)


def training_environment(settings: DemoSettings, trace: Path) -> dict[str, str]:
    """Variables for every trainer; a stock script is traced by them alone."""
    from megatron_ft.testing.demo_model import ENVIRONMENT

    # Host memory everywhere, so that the same bits come out with and without a GPU.
    variables = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    if settings.checkout is None:
        return variables
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return stock_script.environment(trace, {**variables, **path})


def job_spec(
    settings: DemoSettings, folders: Folders, corpus: Path, name: str, *, snapshots: bool = True
) -> JobSpec:
    """The job of the protected run, or with ``snapshots=False`` of the uninterrupted one."""
    trace = folders.protected if snapshots else folders.oracle
    return JobSpec(
        name=name,
        command=training_command(settings, folders, corpus, trace, snapshots=snapshots),
        nodes=settings.nodes,
        spares=settings.spares,
        ranks_per_node=settings.ranks_per_node,
        scheme=settings.scheme,
        sizes=Sizes(block_bytes=_BLOCK_BYTES, slot_count=2, crc=isal.available()),
        timing=_TIMING,
        log_dir=folders.logs / ("run" if snapshots else "uninterrupted"),
        environment=training_environment(settings, trace),
    )
