"""Every setting of a job, declared once, and the places where settings are given.

Flags, environment variables, JSON keys, help texts and docs follow from the fields of
:class:`SnapshotConfig`.  A :class:`Source` is one place; ``resolve`` makes a configuration of
several.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_ft.config.setting import (
    AUTO,
    INTERVAL,
    SCHEME,
    WORD,
    Setting,
    bandwidth,
    folder,
    number,
    one_of,
    seconds,
    setting,
    whole,
)
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import CHEAPEST, HOLD, SHRINK, STOP

SWITCH = "--inmem-snapshot"
SWITCH_HELP = "Keep snapshots of the training state in host memory and restore from them."


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Settings of a job's snapshots; immutable, checked when it is made.

    Fields are in the order of the documentation.  Megatron flags are ``--inmem-<name with
    dashes>``; environment variables are ``MEGATRON_FT_<NAME>``.  Values out of range raise one
    ConfigError that lists all of them.
    """

    # Interval, redundancy and memory.
    snapshot_interval: int | str = setting(
        INTERVAL,
        2,
        "Iterations between snapshots. One that is due before the last is committed is skipped. "
        "auto: found from what they cost and how often the job fails.",
        allowed="a whole number >= 1, or auto",
        accepts=lambda v: v == AUTO or v >= 1,
        unit="iterations",
        job=False,
    )
    overhead_percent: float = number(
        1.0,
        "Most that snapshots may take of all training time, where their interval is auto.",
        "percent",
        above=0,
        most=50,
    )
    p99_budget_percent: float = number(
        0.0,
        "Most that snapshots may add to the 99th percentile of iteration times; they wait where "
        "they add more. 0: no budget.",
        "percent",
    )
    expected_mtbf_hours: float = number(
        3.0,
        "Time between failures that the job expects before it has seen any; for the interval auto.",
        "hours",
        above=0,
    )
    protect: str = setting(
        SCHEME,
        "rs:3+1",
        "Redundancy over nodes: how many nodes share their parity, and how many may be lost.",
        allowed="xor:N, rs:K+M, replica:R or none",
    )
    slots: int | str = setting(
        INTERVAL,
        AUTO,
        "Snapshots kept of each shard. With 3 none is skipped while one is read for a drain. "
        "auto: 3 with a drain folder where every node has the memory, else 2.",
        allowed="2, 3 or auto",
        accepts=lambda v: v in (AUTO, 2, 3),
        unit="snapshots",
    )
    copy_threads: int | str = setting(
        INTERVAL,
        AUTO,
        "Threads of a rank that verify and copy at a restore, and that digest what is copied from "
        "a GPU. auto: its share of the cores, at most 16, and 8 beside training; one copies "
        "about 5 GB/s, and digests about 10.",
        allowed="a whole number >= 1, or auto",
        accepts=lambda v: v == AUTO or v >= 1,
        unit="threads",
    )
    arena_dir: Path | None = folder(
        "Folder of the arenas, on a tmpfs; before Linux 6.1, mount it with huge=always. "
        "None: one in /dev/shm."
    )
    checkpoint_dir: Path | None = folder(
        "Where the training command keeps its own checkpoints, used when memory is lost."
    )

    # Drains, traffic between nodes, scrubbing and quarantine.
    drain_dir: Path | None = folder(
        "Folder to which committed snapshots are written; all nodes share it."
    )
    drain_interval: int = whole(
        0,
        "Iterations between snapshots that are written to the drain folder. 0: none.",
        0,
        "iterations",
        needs_drain_dir=True,
    )
    drain_minutes: float = number(
        0.0,
        "Most minutes between snapshots that are written to the drain folder: it bounds what the "
        "loss of all nodes costs. 0: no bound.",
        "minutes",
        needs_drain_dir=True,
    )
    drain_keep: int = whole(
        2,
        "Snapshots kept in the drain folder, and exports of them; older ones are removed.",
        1,
        "snapshots",
        needs_drain_dir=True,
    )
    drain_bandwidth_mib: float = bandwidth(
        "Most that a node writes to the drain folder.", needs_drain_dir=True
    )
    encode_bandwidth_mib: float = bandwidth(
        "Most that a node sends to others while parity is made."
    )
    drain_export_dir: Path | None = folder(
        "Folder in which each drained snapshot becomes a checkpoint of the framework's own. "
        "Two running jobs cannot share it.",
        needs_drain_dir=True,
    )
    drain_stop_seconds: float = seconds(
        25.0,
        "Longest time for the drain of the newest committed snapshot after SIGTERM.",
        needs_drain_dir=True,
    )
    time_limit_seconds: float = seconds(
        0.0,
        "Time from the start of the job to its end by a scheduler; it drains before. 0: no limit.",
        never=True,
        needs_drain_dir=True,
    )
    scrub_percent: float = number(
        1.0,
        "Share of one core that a node uses to read committed snapshots again and check their "
        "digests. 0: none.",
        "percent",
        most=100,
    )
    quarantine_iterations: int = whole(
        10,
        "A snapshot from which training fails twice within this many iterations is not used a "
        "third time. 0: no quarantine.",
        0,
        "iterations",
    )
    exposed_iterations: int = whole(
        0,
        "A loss of one node that would cost more iterations than this is reported (event "
        "`exposed`). 0: four intervals between snapshots, and 15 s at least.",
        0,
        "iterations",
    )
    compare_replicas: int = whole(
        0,
        "Tensors that ranks must have alike are compared by digests in one of this many snapshots; "
        "one in which they differ is not committed. 0: never.",
        0,
        "snapshots",
    )
    compare_except: str | None = setting(
        WORD,
        None,
        "Tensors that differ by design and are not compared: names, with * for any text and commas "
        "between.",
    )
    transport: str = one_of(
        ("auto", "mpi", "tcp"),
        "How encoders reach each other. auto: MPI where one can be loaded, else TCP.",
    )

    # Leases, timeouts, hangs, bad losses and lost nodes.
    lease_seconds: float = seconds(
        10.0, "A node without contact to the supervisor for this long kills its trainers."
    )
    fence_timeout_seconds: float = seconds(
        30.0,
        "Longest wait before optimizer.step() for a running capture; then it is abandoned.",
        job=False,
    )
    hang_seconds: float = seconds(
        600.0,
        "Training hangs if it makes no progress for this long, and for five times the longest such "
        "time so far. 0: no hang detection.",
        never=True,
    )
    restart: str = one_of(
        ("auto", "in-process", "new-process"),
        "How ranks that survive a failure restart: in their process, if the program can (Megatron, "
        "run_resilient), or in a new one. auto: in process, but not on CUDA.",
    )
    on_no_spare: str = one_of(
        (STOP, HOLD, SHRINK, CHEAPEST),
        "When a node is lost and no spare is left: stop, or hold memory until a Slurm job of its "
        "own has brought a host (what memory can serve is drained before), or shrink: continue "
        "with fewer data-parallel ranks, to which the snapshot is reshaped in memory. auto: the "
        "one of these that is expected to lose the fewest node-seconds.",
    )
    host_seconds: float = seconds(
        0.0,
        "Time until a host is there in place of a lost one, as on_no_spare auto expects it; what "
        "the job measures counts too. 0: 1800.",
        never=True,
    )
    queue_seconds: float = seconds(
        0.0,
        "Time that a job which has stopped waits until it is started again, for on_no_spare auto. "
        "0: nothing starts it again.",
        never=True,
    )
    grow: str = one_of(
        ("auto", "off"),
        "When nodes return to a job that has shrunk: auto trains on them again from the next "
        "boundary on, off only from the next start of the job on.",
    )
    last_iteration: int = whole(
        0,
        "Iteration with which training ends; an end before it is an early one, after which the job "
        "continues at its next start. 0: not known. Megatron and the Trainer of transformers know "
        "it themselves.",
        0,
        "iterations",
        job=False,
    )
    keep_minutes: float = number(
        10.0,
        "Without a drain folder, memory is kept for this long after an end of training that "
        "may not have been planned. 0: not at all.",
        "minutes",
    )
    register_timeout_seconds: float = seconds(
        600.0,
        "Longest wait at start-up for all ranks to register and for arenas to be made.",
    )

    def __post_init__(self) -> None:
        problems = []
        for name, declared in SETTINGS.items():
            try:
                object.__setattr__(self, name, declared.parse(getattr(self, name), name))
            except ConfigError as error:
                problems.append(str(error))
        refuse(problems + self._without_effect())

    def _without_effect(self) -> list[str]:
        """Settings of a drain without folder or interval: the user who gave them expects files."""
        if self.drain_dir is not None:
            never = f"drain_dir is {self.drain_dir}, but drain_interval is 0: nothing is written"
            drains = self.drain_interval or self.drain_minutes
            return [] if drains else [f"{never}; give both, or drain_minutes"]
        return [
            f"{name} is {getattr(self, name)}, but there is no drain_dir to write to; give both"
            for name, declared in SETTINGS.items()
            if declared.needs_drain_dir and getattr(self, name) != declared.default
        ]

    @property
    def fixed_interval(self) -> int:
        """Iterations between snapshots, 0 where the job finds it out."""
        return 0 if isinstance(self.snapshot_interval, str) else self.snapshot_interval

    @property
    def fixed_copy_threads(self) -> int:
        """Threads of a rank that copy and digest, 0 where the machine decides."""
        return 0 if isinstance(self.copy_threads, str) else self.copy_threads

    @property
    def fixed_slots(self) -> int:
        """Slots of each arena, 0 where the job chooses them."""
        return 0 if isinstance(self.slots, str) else self.slots

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> SnapshotConfig:
        """Settings from ``MEGATRON_FT_<NAME>`` variables; what is not set keeps its default."""
        return resolve(environment_source(environment))

    def job_variables(self) -> dict[str, str]:
        """The environment variables by which trainers learn what the supervisor uses."""
        values = {s.variable: getattr(self, s.name) for s in SETTINGS.values() if s.job}
        return {name: "" if value is None else str(value) for name, value in values.items()}


SETTINGS: Mapping[str, Setting] = {
    f.name: dataclasses.replace(f.metadata["setting"], name=f.name)
    for f in dataclasses.fields(SnapshotConfig)
}
"""Every setting by its name, in the order of the documentation."""

ADVANCED = "advanced"
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "protection": ("protect", "slots", "arena_dir"),
    "disk": (
        "drain_dir", "drain_interval", "drain_minutes", "drain_keep", "drain_stop_seconds",
        "drain_export_dir", "checkpoint_dir", "time_limit_seconds",
    ),
    "failures": (
        "on_no_spare", "host_seconds", "queue_seconds", "grow", "restart", "hang_seconds",
        "keep_minutes",
    ),
}  # fmt: skip


def settings_by_group() -> Mapping[str, list[Setting]]:
    """The settings of a job, in the groups of its help; ADVANCED has what few need."""
    groups = {title: [SETTINGS[name] for name in names] for title, names in _GROUPS.items()}
    usual = {name for names in _GROUPS.values() for name in names}
    others = [s for s in SETTINGS.values() if s.job and s.name not in usual]
    return {**groups, ADVANCED: others}


@dataclass(frozen=True)
class Source:
    """The settings that one place gives, by name; ``label`` says where each is given.

    None and empty text count as not given.
    """

    values: Mapping[str, Any]
    label: Callable[[str], str]

    @property
    def given(self) -> dict[str, Any]:
        return {n: v for n, v in self.values.items() if v is not None and v != ""}


def environment_source(environment: Mapping[str, str] | None = None) -> Source:
    """Environment variables of settings as a source; other variables are not looked at."""
    variables = os.environ if environment is None else environment
    return Source(
        {name: variables.get(declared.variable) for name, declared in SETTINGS.items()},
        lambda name: SETTINGS[name].variable,
    )


def resolve(*sources: Source) -> SnapshotConfig:
    """Each setting from the first source that gives it, converted to its type, else its default.

    Raises one ConfigError that lists every unknown name and every bad value, with the
    place where it stands.
    """
    values: dict[str, Any] = {}
    problems = []
    for source in sources:
        for name, value in source.given.items():
            if name not in SETTINGS:
                problems.append(f"unknown setting {name!r}; {nearest(name, SETTINGS)}")
                continue
            try:
                values.setdefault(name, SETTINGS[name].parse(value, source.label(name)))
            except ConfigError as error:
                problems.append(str(error))
    refuse(problems)
    return SnapshotConfig(**values)


def differences(ours: Source, theirs: Source) -> dict[str, str]:
    """Settings to which two sources give different values, each with a line that names them.

    Only None counts as not given here: empty text means "none".  Raises ConfigError
    for a value that does not convert.
    """
    lines = {}
    for name, declared in SETTINGS.items():
        mine, other = ours.values.get(name), theirs.values.get(name)
        if mine is None or other is None:
            continue
        if declared.parse(mine, ours.label(name)) != declared.parse(other, theirs.label(name)):
            theirs_is = other if other != "" else declared.shown_default
            lines[name] = f"{ours.label(name)} is {mine}, but {theirs.label(name)} is {theirs_is}"
    return lines


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with the problems, if there are any: one a line when several."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} settings are wrong:{lines}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint for a name that is not known: the nearest one, else all of them.

    ``prefix`` is common to all and tells nothing about which one was meant.
    """
    rest = [candidate.removeprefix(prefix) for candidate in known]
    near = get_close_matches(name.removeprefix(prefix), rest, n=1)
    names = ", ".join(prefix + candidate for candidate in near or rest)
    return f"did you mean {names}?" if near else f"known: {names}"
