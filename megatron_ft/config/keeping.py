"""What becomes of snapshots beside training: drained, sent, read again, distrusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config.declare import (
    bandwidth,
    folder,
    one_of,
    seconds,
    seconds_or_never,
    setting,
    whole,
)
from megatron_ft.config.setting import CPUS, NUMBER
from megatron_ft.core.word import MOST_SECONDS


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
    quiet_seconds: float = setting(
        NUMBER,
        1.0,
        "Longest time that a window marked by trainers (megatron_ft.quiet) holds the traffic of "
        "encoders and drains; then it goes on, with a warning.",
        allowed=f"seconds > 0, at most {MOST_SECONDS:g}",
        accepts=lambda v: 0 < v <= MOST_SECONDS,
        unit="seconds",
        job=True,
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
