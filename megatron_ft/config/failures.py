"""What counts as a failure, of a part or of the job, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config.declare import folder, one_of, seconds, seconds_or_never, setting
from megatron_ft.config.setting import NUMBER, WORD
from megatron_ft.core.fewer_ranks import HOLD, SHRINK, STOP


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
