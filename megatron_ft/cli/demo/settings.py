"""Settings of a demo: the user's choices, the folders that it writes to, and the job it runs."""

from __future__ import annotations

import math
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megatron_ft.cli.demo.corruption import BrokenMemory, plan_corruption
from megatron_ft.cli.demo.demo_model import (
    ENVIRONMENT,
    HEADS,
    VOCABULARY_UNIT,
    demo_arguments,
)
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import possible_scheme

FEWEST_ITERATIONS = 20
ITERATIONS = 80
"""With fewer, training on few cores may end before encoders are up again for the next fault."""
CORPUS_BYTES = 1 << 20
RESHAPED_ITERATIONS = 40
"""More iterations for a reshape: until encoders are up for it, and then in the other layout."""
SNAPSHOT_INTERVAL = 2
MICRO_BATCH = 2
# Twelve processes on a few cores may all stand still for a while; deaths are noticed without it.
_LEASE_SECONDS = 30.0
# A job that is stopped and started again waits for the end of the older lease.
_RESHAPED_LEASE_SECONDS = 10.0


class DemoFolders:
    """Folders that one demo writes to, below ``root``, which is new or empty at the start.

    ``logs`` has the output of every process, ``state`` the supervisor's notes (gone at the end),
    ``corpus`` the training text; ``protected`` and ``oracle`` have trace and final state of the
    run that faults hit and of the one without any.  ``report`` is the page about the former.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.logs, self.state = root, root / "logs", root / "state"
        self.corpus, self.protected = root / "corpus", root / "run"
        self.oracle, self.report = root / "uninterrupted", root / "report.html"


class DemoLayout(NamedTuple):
    """Sizes of tensor, pipeline and data parallelism."""

    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._asdict().items())


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The user's choices; ConfigError where they cannot be met.

    ``lose`` is how many nodes the second fault takes at once, and again the reshape.  ``reshape``
    is the layout in which the job is started again at the end, None: it is not.  With ``corrupt``
    a broken memory is the only fault.
    """

    tp: int = 1
    pp: int = 1
    nodes: int = 4
    spares: int = 1
    ranks_per_node: int = 1
    protect: str = "rs:3+1"
    iterations: int = ITERATIONS
    seed: int = 0
    lose: int = 1
    reshape: DemoLayout | None = None
    corrupt: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "nodes", "ranks_per_node", "lose"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {getattr(self, name)}; give a number >= 1")
        if HEADS % self.tp:
            raise ConfigError(f"--tp {self.tp}: the demo's model has {HEADS} heads; give 1, 2 or 4")
        if self.iterations < FEWEST_ITERATIONS:
            raise ConfigError(
                f"--iterations {self.iterations} leaves no room for three faults; give at least "
                f"{FEWEST_ITERATIONS}"
            )
        if self.lose > self.nodes:
            raise ConfigError(f"--lose {self.lose} is more than the {self.nodes} nodes that train")
        if self.world_size % (self.tp * self.pp):
            raise ConfigError(
                f"{self.world_size} ranks (--nodes {self.nodes} x --ranks-per-node "
                f"{self.ranks_per_node}) cannot be divided by {self.tp * self.pp}, which --tp "
                f"{self.tp} and --pp {self.pp} make of one copy of the model"
            )

        if self.corrupt and (self.data_parallel < 2 or not self.spares or self.reshape):
            raise ConfigError(
                "--corrupt shows replicas that differ, and a spare that takes over: it needs two "
                "data-parallel ranks at least and --spares, and is not combined with --reshape"
            )

    @property
    def broken(self) -> BrokenMemory | None:
        if not self.corrupt:
            return None
        nodes = [f"node{number}" for number in range(self.nodes)]
        return plan_corruption(self.seed, self.iterations, nodes)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.protect)

    @property
    def layout(self) -> DemoLayout:
        return DemoLayout(self.tp, self.pp, self.data_parallel)

    @property
    def layouts(self) -> tuple[DemoLayout, ...]:
        return (self.layout, *(() if self.reshape is None else (self.reshape,)))

    @property
    def all_iterations(self) -> int:
        return self.iterations + RESHAPED_ITERATIONS * (self.reshape is not None)


def job_name() -> str:
    """A name that no other job has; short, as Unix socket paths contain it."""
    return f"demo-{os.getpid()}-{uuid.uuid4().hex[:4]}"


_OWN = {
    # Host memory everywhere, so that the same bits come out with and without a GPU.
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}
"""Variables of the demo's trainers, in addition to those of Megatron on a CPU."""


def job_of(
    settings: DemoSettings, folders: DemoFolders, text: Path, name: str, *, snapshots: bool = True
) -> RunCommand:
    trace = folders.protected if snapshots else folders.oracle
    flags: Mapping[str, object] = {
        "--job": name,
        "--nodes": settings.nodes,
        "--spares": settings.spares,
        "--ranks-per-node": settings.ranks_per_node,
        "--protect": settings.protect,
        "--lease-seconds": _LEASE_SECONDS if settings.reshape is None else _RESHAPED_LEASE_SECONDS,
        # The stand-in for CUDA says that it is available.
        "--restart": "in-process",
        "--state-dir": folders.state,
        "--log-dir": folders.logs / ("run" if snapshots else "uninterrupted"),
    }
    broken = settings.broken if snapshots else None
    if broken is not None:
        flags = {**flags, "--compare-replicas": 1}
    variables = {**ENVIRONMENT, **_OWN, **(broken.variables if broken else {})}
    training = _command(settings, settings.layout, folders, text, trace, snapshots)
    return RunCommand(flags, tuple(training), variables)


def reshaped_job(
    settings: DemoSettings, job: RunCommand, folders: DemoFolders, text: Path
) -> RunCommand:
    layout = settings.reshape
    assert layout is not None, "the user asked for it"
    nodes = layout.ranks // settings.ranks_per_node
    changed = {
        "--nodes": nodes,
        "--spares": settings.nodes + settings.spares - nodes,
        "--protect": possible_scheme(nodes, 1, settings.scheme) or settings.scheme,
    }
    training = _command(settings, layout, folders, text, folders.protected, True)
    return replace(job, flags={**job.flags, **changed}, training=tuple(training))


# Dropout would be drawn anew in another layout.
_SAME_LOSSES = "--attention-dropout 0 --hidden-dropout 0".split()


def _command(
    settings: DemoSettings,
    layout: DemoLayout,
    folders: DemoFolders,
    text: Path,
    trace: Path,
    snapshots: bool,
) -> list[str]:
    """The command of each rank: Megatron's own loop on a small GPT that all layouts can train."""
    tps, pps, dps = zip(*settings.layouts, strict=True)
    flags = demo_arguments(
        tp=layout.tp,
        pp=layout.pp,
        iterations=settings.all_iterations,
        data_path=text,
        layers=2 * math.lcm(*pps),
        micro_batch=MICRO_BATCH,
        # In a pipeline two micro-batches for each data-parallel rank, so that stages overlap.
        global_batch=MICRO_BATCH * math.lcm(*dps) * (1 if max(pps) == 1 else 2),
        cache_path=folders.corpus / "indices",
    )
    if settings.reshape is not None:
        # Megatron pads the vocabulary to a multiple of this times tp: it must come out equal.
        padded = str(VOCABULARY_UNIT * math.lcm(*tps) // layout.tp)
        flags += [*_SAME_LOSSES, "--make-vocab-size-divisible-by", padded]
    program = [sys.executable, "-m", "megatron_ft.cli.demo.pretrain_gpt", *flags]
    switch = ["--inmem-snapshot", "--inmem-snapshot-interval", str(SNAPSHOT_INTERVAL)]
    return [*program, "--trace-dir", str(trace), *(switch if snapshots else [])]


def read_layout(text: str, settings: DemoSettings) -> DemoLayout:
    """The layout that ``text`` names, as ``tp=1,dp=3``; sizes that it leaves out stay.

    ConfigError if the demo of ``settings`` cannot continue in it.
    """
    layout = settings.layout._replace(**_sizes(text))
    label = f"--reshape {text}"
    if settings.lose > settings.scheme.parity_members:
        raise ConfigError(
            f"{label}: --lose {settings.lose} is more than {settings.protect} survives, so there "
            "would be nothing to reshape"
        )
    if layout == settings.layout:
        raise ConfigError(f"{label}: the demo begins with this layout; give another one")
    if HEADS % layout.tp:
        raise ConfigError(f"{label}: the demo's model has {HEADS} heads; give tp 1, 2 or 4")
    _check_nodes(label, layout, settings)
    return layout


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        good = equals and name in DemoLayout._fields and name not in sizes and size.isdecimal()
        if not good or int(size) < 1:
            raise ConfigError(
                f"--reshape {text}: {part!r} is not a size; give some of tp, pp and dp once each, "
                "as in tp=1,dp=3"
            )
        sizes[name] = int(size)
    return sizes


def _check_nodes(label: str, layout: DemoLayout, settings: DemoSettings) -> None:
    """ConfigError, with the nearest dp that will do, if the nodes that are left do not fit."""
    per_node = settings.ranks_per_node
    left = settings.nodes + settings.spares - 2 * settings.lose
    reason = _against(layout, settings, left)
    if not reason:
        return
    fitting = [
        dp
        for dp in range(1, left * per_node + 1)
        if (one := layout._replace(dp=dp)) != settings.layout
        if not _against(one, settings, left)
    ]
    nearest = min(fitting, key=lambda dp: (abs(dp - layout.dp), dp), default=None)
    advice = "no dp will do: give another tp or pp, or more --spares"
    if nearest is not None:
        advice = f"the nearest dp that will do is {nearest}; or give more --spares"
    raise ConfigError(f"{label}: {reason}; {advice}")


def _against(layout: DemoLayout, settings: DemoSettings, left: int) -> str:
    """The reason why ``left`` nodes cannot train in the layout; empty if they can."""
    nodes, rest = divmod(layout.ranks, settings.ranks_per_node)
    if rest:
        per_node = f"--ranks-per-node {settings.ranks_per_node}"
        return f"{layout.ranks} ranks are not a multiple of {per_node}"
    if nodes > left:
        return (
            f"its {layout.ranks} ranks take {nodes} nodes, and {left} are left when a fault and "
            f"the reshape have taken {settings.lose} each"
        )
    if possible_scheme(nodes, 1, settings.scheme) is None:
        return f"{nodes} node has no other one to be protected by"
    return ""
