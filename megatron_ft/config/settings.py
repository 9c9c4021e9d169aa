"""Declares every setting of a job once: name, type, default, flag and help.

How a field of a settings class says what it is: kind, default, meaning, allowed values.

How tensors are cut up to be captured.

When snapshots are taken, where they lie and how they are protected.

What becomes of snapshots beside training: drained, sent, read again, distrusted.

What counts as a failure, of a part or of the job, and what follows it.

Every setting, in the order of the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.config.setting import (
    AUTO,
    CPUS,
    FOLDER,
    INTERVAL,
    NUMBER,
    SCHEME,
    WHOLE,
    WORD,
    Kind,
    Setting,
)
from megatron_ft.core.identity import HOLD, SHRINK, STOP


def setting(
    kind: Kind,
    default: Any,
    help_text: str,
    *,
    allowed: str = "",
    accepts: Callable[[Any], bool] = lambda value: True,
    unit: str = "",
    job: bool = False,
) -> Any:
    """A field with a :class:`Setting` behind it, whose name is the field's."""
    described = Setting("", kind, default, help_text, unit, allowed or kind.name, accepts, job)
    return field(default=default, metadata={"setting": described})


def whole(default: int, help_text: str, least: int, unit: str, job: bool = False) -> Any:
    """A whole number of at least ``least``."""
    allowed = f"a whole number >= {least}"
    return setting(
        WHOLE, default, help_text, allowed=allowed, accepts=lambda v: v >= least, unit=unit, job=job
    )


def seconds(default: float, help_text: str, job: bool = False) -> Any:
    """A time that is never zero."""
    return setting(
        NUMBER,
        default,
        help_text,
        allowed="seconds > 0",
        accepts=lambda v: v > 0,
        unit="seconds",
        job=job,
    )


def seconds_or_never(default: float, help_text: str) -> Any:
    """A time of the job, with zero for never."""
    return setting(
        NUMBER,
        default,
        help_text,
        allowed="seconds >= 0",
        accepts=lambda v: v >= 0,
        unit="seconds",
        job=True,
    )


def bandwidth(help_text: str) -> Any:
    """A node's limit on traffic of one kind; there is none by default."""
    return setting(
        NUMBER,
        0.0,
        f"{help_text} 0: no limit.",
        allowed="MiB a second >= 0",
        accepts=lambda v: v >= 0,
        unit="MiB/s",
        job=True,
    )


def folder(help_text: str) -> Any:
    """A folder of the job's that need not be given."""
    return setting(FOLDER, None, help_text, job=True)


def one_of(words: tuple[str, ...], help_text: str) -> Any:
    """One of several words for the job, the first by default."""
    *others, last = words
    allowed = f"{', '.join(others)} or {last}"
    return setting(
        WORD, words[0], help_text, allowed=allowed, accepts=lambda v: v in words, job=True
    )


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Sizes from which, and into which, tensors are split."""

    replicated_split_bytes: int = whole(
        65536,
        "Replicated tensors of at least this size are split over data-parallel ranks.",
        0,
        "bytes",
    )
    copy_piece_bytes: int = whole(
        16 << 20, "Device-to-host copies are cut in pieces of this size.", 1, "bytes"
    )


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Interval, redundancy and memory."""

    snapshot_interval: int | str = setting(
        INTERVAL,
        2,
        "Iterations between snapshots. One that is due before the last is committed is skipped. "
        "auto: found from what they cost and how often the job fails.",
        allowed="a whole number >= 1, or auto",
        accepts=lambda v: v == AUTO or v >= 1,
        unit="iterations",
    )
    overhead_percent: float = setting(
        NUMBER,
        1.0,
        "Most that snapshots may take of all training time, where their interval is auto.",
        allowed="percent > 0, at most 50",
        accepts=lambda v: 0 < v <= 50,
        unit="percent",
        job=True,
    )
    expected_mtbf_hours: float = setting(
        NUMBER,
        3.0,
        "Time between failures that the job expects before it has seen any; for the interval auto.",
        allowed="hours > 0",
        accepts=lambda v: v > 0,
        unit="hours",
        job=True,
    )
    protect: str = setting(
        SCHEME,
        "rs:3+1",
        "Redundancy over nodes: how many nodes share their parity, and how many may be lost.",
        allowed="xor:N, rs:K+M, replica:R or none",
        job=True,
    )
    slots: int = setting(
        WHOLE,
        2,
        "Snapshots kept of each shard. With 3 none is skipped while one is read for a drain.",
        allowed="2 or 3",
        accepts=lambda v: v in (2, 3),
        unit="snapshots",
        job=True,
    )
    arena_dir: Path | None = folder(
        "Folder of the arenas, on a tmpfs; before Linux 6.1, mount it with huge=always. "
        "None: one in /dev/shm."
    )
    checkpoint_dir: Path | None = folder(
        "Where the training command keeps its own checkpoints, used when memory is lost."
    )


@dataclass(frozen=True, kw_only=True)
class KeepingSettings:
    """Drains, traffic between nodes, scrubbing and quarantine."""

    drain_dir: Path | None = folder(
        "Folder to which committed snapshots are written; all nodes share it."
    )
    drain_interval: int = whole(
        0,
        "Iterations between snapshots that are written to the drain folder. 0: none.",
        0,
        "iterations",
        job=True,
    )
    drain_keep: int = whole(
        2,
        "Snapshots kept in the drain folder, and exports of them; older ones are removed.",
        1,
        "snapshots",
        job=True,
    )
    drain_keep_every: int = whole(
        0,
        "Beside the newest, the first snapshot drained in every so many iterations stays for "
        "good. 0: none does.",
        0,
        "iterations",
        job=True,
    )
    drain_bandwidth_mib: float = bandwidth("Most that a node writes to the drain folder.")
    encode_bandwidth_mib: float = bandwidth(
        "Most that a node sends to others while parity is made."
    )
    background_cpus: str | None = setting(
        CPUS,
        None,
        "The CPUs of each node on which SMP, encoder and drains run. None: any.",
        allowed="CPUs that every node has, such as 0-3,8",
        job=True,
    )
    drain_export_dir: Path | None = folder(
        "Folder in which each drained snapshot becomes a checkpoint of the framework's own. "
        "Two running jobs cannot share it."
    )
    drain_stop_seconds: float = seconds(
        25.0,
        "After SIGTERM the newest committed snapshot is drained, for at most so long.",
        job=True,
    )
    time_limit_seconds: float = seconds_or_never(
        0.0, "When the job will be killed, counted from its start: it drains in time. 0: never."
    )
    scrub_percent: float = setting(
        NUMBER,
        1.0,
        "Share of one core that a node uses to read committed snapshots again and check their "
        "digests. 0: none.",
        allowed="0 to 100",
        accepts=lambda v: 0 <= v <= 100,
        unit="percent",
        job=True,
    )
    quarantine_iterations: int = whole(
        10,
        "A snapshot from which training fails twice within so many iterations is not used a third "
        "time. 0: never mind.",
        0,
        "iterations",
        job=True,
    )
    transport: str = one_of(
        ("auto", "mpi", "tcp"),
        "How encoders reach each other. auto: MPI where one can be loaded, else TCP.",
    )


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """Leases, timeouts, hangs, stragglers, bad losses and lost nodes."""

    lease_seconds: float = seconds(
        10.0, "A node that hears nothing of the supervisor kills its trainers after it.", job=True
    )
    loss_gate: float = setting(
        NUMBER,
        0.0,
        "A loss that is not finite, or above this many times the median of the last 64, keeps a "
        "snapshot from replacing the last good one. 0: no gate.",
        allowed="0, or a number > 1",
        accepts=lambda v: v == 0 or v > 1,
    )
    fence_timeout_seconds: float = seconds(
        30.0, "Longest wait before optimizer.step() for a running capture; then it is abandoned."
    )
    on_hang: str = one_of(
        ("restart", "report"),
        "What follows when training makes no progress: a restart from memory, or only a report.",
    )
    hang_seconds: float = seconds_or_never(
        600.0,
        "Training that makes no progress for at least so long, and for hang_factor times the "
        "longest such time so far, hangs. 0: hangs are not looked for.",
    )
    hang_factor: float = setting(
        NUMBER,
        5.0,
        "See hang_seconds.",
        allowed="a number >= 1",
        accepts=lambda v: v >= 1,
        job=True,
    )
    straggler_percent: float = setting(
        NUMBER,
        5.0,
        "A rank that is slower than its peers by this much over 50 iterations is named. 0: none.",
        allowed="percent >= 0",
        accepts=lambda v: v >= 0,
        unit="percent",
        job=True,
    )
    on_no_spare: str = one_of(
        (STOP, HOLD, SHRINK),
        "When a node is lost and no spare is left, what memory can serve is drained; then stop, "
        "hold memory until a Slurm job of its own has brought a host, or shrink: go on with fewer "
        "data-parallel ranks from an export in drain_export_dir.",
    )
    export_on_failure: Path | None = folder(
        "Folder in which a job that stops because its trainers cannot come back leaves the last "
        "snapshot as a checkpoint of the framework's own. Two running jobs cannot share it."
    )
    spare_imports: str = setting(
        WORD,
        "auto",
        "What spare nodes import once, at low priority, so that trainers start there sooner: "
        "auto for torch and the framework in the command, none, or modules with commas between.",
        allowed="auto, none or modules",
        job=True,
    )
    register_timeout_seconds: float = seconds(
        600.0,
        "Longest wait at start-up for all ranks to register and for arenas to be made.",
        job=True,
    )


SWITCH = "--inmem-snapshot"
SWITCH_HELP = "Keep snapshots of the training state in host memory and restore from them."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(CaptureSettings, FailureSettings, KeepingSettings, SnapshotSettings):
    """The values of all settings, not checked.  Fields come from the last base to the first."""


SETTINGS: Mapping[str, Setting] = {
    f.name: dataclasses.replace(f.metadata["setting"], name=f.name)
    for f in dataclasses.fields(Settings)
}
"""Every setting by its name, in the order of the documentation."""
