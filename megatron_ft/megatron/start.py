"""Where a life of the job starts from: memory or disk.  Decided once, by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.disk.native import TRACKER


class Wish(NamedTuple):
    """What the user asks Megatron to load; kept in each snapshot, so that a change shows."""

    checkpoint_step: int | None


class Disk(NamedTuple):
    """What Megatron itself would start from: an iteration, -1 if it would load nothing.

    ``explicit`` is True if the user named that iteration.
    """

    iteration: int
    explicit: bool = False


class Start(NamedTuple):
    """The decision, and the reason for it in words."""

    from_memory: bool
    reason: str


def wish_of(args: Any) -> Wish:
    """The wish in these arguments."""
    return Wish(getattr(args, "ckpt_step", None))


def disk_of(args: Any) -> Disk:
    """What Megatron would load, from its arguments and its tracker file.

    With ``--finetune``, a release, or ``--pretrained-checkpoint`` it starts at iteration 0,
    whatever the number of the checkpoint that it reads.
    """
    directory = getattr(args, "load", None)
    if not directory:
        return Disk(0 if getattr(args, "pretrained_checkpoint", None) else -1)
    if getattr(args, "finetune", False):
        return Disk(0)
    if getattr(args, "ckpt_step", None):
        return Disk(args.ckpt_step, explicit=True)
    try:
        word = Path(directory, TRACKER).read_text().strip()
    except OSError:
        return Disk(-1)
    return Disk(int(word) if word.isdigit() else 0)


def decide(offers: Sequence[int], disk: Disk, allowed: bool, wish_changed: bool) -> Start:
    """Choose for all ranks; ``offers`` are the iterations that they were offered, -1 for none.

    Memory serves if every rank has the same snapshot, and what Megatron would load is not
    newer.  A checkpoint that the user names, and did not name when the snapshot was taken,
    is what he wants, even if it is older; one that he named before was loaded before.
    """
    newest = max(offers)
    if newest < 0:
        return Start(False, "no snapshot is in memory")
    if not allowed:
        return Start(False, "the job decided to start from disk")
    if min(offers) != newest:
        lacking = [rank for rank, offer in enumerate(offers) if offer != newest]
        return Start(False, f"ranks {lacking} were not offered the snapshot of iteration {newest}")
    if disk.explicit:
        if wish_changed:
            return Start(False, f"--ckpt-step {disk.iteration} was asked for")
        return Start(True, f"--ckpt-step {disk.iteration} was loaded in an earlier life")
    if disk.iteration > newest:
        return Start(False, f"the checkpoint of iteration {disk.iteration} is newer")
    return Start(True, f"newer than what is on disk ({_disk_text(disk)})")


def _disk_text(disk: Disk) -> str:
    return "nothing" if disk.iteration < 0 else f"iteration {disk.iteration}"
