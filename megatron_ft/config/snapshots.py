"""When snapshots are taken, where they lie and how they are protected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config.declare import folder, setting
from megatron_ft.config.setting import AUTO, INTERVAL, NUMBER, SCHEME, WHOLE


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
