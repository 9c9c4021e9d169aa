"""What Megatron would start from by itself, from its arguments and its tracker file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.native import TRACKER
from megatron_ft.trainer.start_choice import DiskStart

NOTE = ".megatron-ft-resume"
"""In the folder of ``--save``: the iteration of the checkpoint that is to be resumed from.

Written by megatron_ft.megatron.rerun.
"""


def wish_of(args: Any) -> tuple[int | None, ...]:
    """What the user asks Megatron to load; kept in each snapshot, so that a change shows.

    The checkpoint's iteration, and the one that training is to go on with if that is given.
    """
    step, going_on = getattr(args, "ckpt_step", None), _override(args)
    return (step,) if going_on is None else (step, going_on)


def _override(args: Any) -> int | None:
    found: int | None = getattr(args, "override_ckpt_iteration", None)
    return found


def disk_of(args: Any) -> DiskStart:
    """What Megatron would load.

    With ``--finetune``, a release, or ``--pretrained-checkpoint`` it starts at iteration 0,
    and with ``--override-ckpt-iteration`` at that one, whatever the number of the checkpoint
    that it reads.
    """
    directory = getattr(args, "load", None)
    if not directory:
        return DiskStart(0 if getattr(args, "pretrained_checkpoint", None) else -1)
    if getattr(args, "finetune", False):
        return DiskStart(0)
    found = getattr(args, "ckpt_step", None) or tracked_iteration(Path(directory, TRACKER))
    override = _override(args)
    if found < 0:
        return DiskStart(-1)
    resumed = override is None and noted(Path(directory)) == found
    return DiskStart(found if override is None else override, _asked(args), resumed)


def tracked_iteration(tracker: Path) -> int:
    """The iteration that a tracker file names, 0 for a release, -1 if there is no such file."""
    try:
        word = tracker.read_text(errors="replace").strip()
    except OSError:
        return -1
    return int(word) if word.isdigit() else 0


def noted(folder: Path) -> int:
    """The iteration whose checkpoint in this folder is to be resumed from, -1 for none."""
    try:
        word = (folder / NOTE).read_text(errors="replace").strip()
    except OSError:
        return -1
    return int(word) if word.isdigit() else -1


def _asked(args: Any) -> str:
    flags = {
        "--ckpt-step": getattr(args, "ckpt_step", None) or None,
        "--override-ckpt-iteration": _override(args),
    }
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
