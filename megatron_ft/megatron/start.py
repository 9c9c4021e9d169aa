"""What Megatron would start from by itself, from its arguments and its tracker file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.disk.native import TRACKER
from megatron_ft.recovery.start import Disk


class Wish(NamedTuple):
    """What the user asks Megatron to load; kept in each snapshot, so that a change shows."""

    checkpoint_step: int | None


def wish_of(args: Any) -> Wish:
    """The wish in these arguments."""
    return Wish(getattr(args, "ckpt_step", None))


def disk_of(args: Any) -> Disk:
    """What Megatron would load.

    With ``--finetune``, a release, or ``--pretrained-checkpoint`` it starts at iteration 0,
    whatever the number of the checkpoint that it reads.
    """
    directory = getattr(args, "load", None)
    if not directory:
        return Disk(0 if getattr(args, "pretrained_checkpoint", None) else -1)
    if getattr(args, "finetune", False):
        return Disk(0)
    if getattr(args, "ckpt_step", None):
        return Disk(args.ckpt_step, asked=f"--ckpt-step {args.ckpt_step}")
    try:
        word = Path(directory, TRACKER).read_text().strip()
    except OSError:
        return Disk(-1)
    return Disk(int(word) if word.isdigit() else 0)
