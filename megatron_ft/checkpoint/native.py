"""Names and places of the training framework's own checkpoints; what they hold is not read.

The second half says what Megatron would start from by itself, from its arguments and its tracker.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.trainer.start_choice import DiskStart

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file that names its newest checkpoint."""

LATEST = "latest"
"""DeepSpeed's file that names its newest checkpoint (engine.py, save_checkpoint)."""


def newest_checkpoint(directory: Path | None) -> Path | None:
    """The newest complete checkpoint of the framework in ``directory``, or None.

    Both write the name after everything else: Megatron-LM in its tracker file
    (megatron/training/checkpointing.py, get_checkpoint_tracker_filename), DeepSpeed in
    ``latest``, where that holds for all ranks only if deepspeed_ext saved it.
    """
    if directory is None:
        return None
    tag = latest_tag(directory)
    for found in (_newest_of_megatron(directory), directory / tag if tag else None):
        if found is not None and found.is_dir() and any(found.iterdir()):
            return found
    return None


def _newest_of_megatron(directory: Path) -> Path | None:
    word = _word(directory / TRACKER)
    if word == "release":
        return directory / word
    return checkpoint_folder(directory, int(word)) if _is_iteration(word) else None


def _word(path: Path) -> str:
    """Text of a small file, '' if there is none; after a power loss it may hold anything.

    OSError where the storage does not answer.
    """
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def _is_iteration(word: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", word) is not None


def naming(directory: Path) -> str:
    """Mark that tells one naming of a newest checkpoint from all others; '' if none is named.

    A checkpoint that is saved anew in the place of another is named anew, too.
    """
    found = []
    for file in (directory / TRACKER, directory / LATEST):
        if file.is_file():
            about = file.stat()
            found.append(f"{_word(file)} {about.st_mtime_ns} {about.st_ino}")
    return ", ".join(found)


def latest_tag(directory: Path) -> str:
    """The tag that DeepSpeed's ``latest`` names, '' if it names none that is a name of a folder."""
    tag = _word(directory / LATEST)
    parts = Path(tag).parts
    return tag if parts and not Path(tag).is_absolute() and ".." not in parts else ""


def step_of_tag(tag: str) -> int | None:
    """The global step in a tag that DeepSpeed chose itself; of another one nothing is known."""
    match = re.fullmatch(r"global_step(\d+)", tag)
    return int(match[1]) if match else None


def iteration_of(checkpoint: Path) -> int:
    """The iteration of a checkpoint that newest_checkpoint gave; -1 if its name says none."""
    digits = re.search(r"(\d+)$", checkpoint.name)
    return -1 if digits is None else int(digits[1])


def newest_iteration(directory: Path | None) -> int:
    """The iteration of the newest checkpoint in ``directory``; -1 if there is none."""
    newest = newest_checkpoint(directory)
    return -1 if newest is None else iteration_of(newest)


def checkpoint_folder(directory: Path, iteration: int) -> Path:
    """Folder of Megatron-LM's checkpoint of an iteration (``get_checkpoint_name`` there)."""
    return directory / f"iter_{iteration:07d}"


def point_tracker(directory: Path, iteration: int) -> None:
    """Have Megatron-LM load this iteration, unless the folder holds a newer one already."""
    known = _word(directory / TRACKER)
    if _is_iteration(known) and int(known) > iteration:
        return
    DiskCalls().write_file(directory / TRACKER, [str(iteration).encode()])


def retract(directory: Path, checkpoint: Path) -> None:
    """Have no framework load this checkpoint: what names it as the newest one is removed."""
    if _newest_of_megatron(directory) == checkpoint:
        DiskCalls().remove(directory / TRACKER)
    if latest_tag(directory) == checkpoint.name:
        DiskCalls().remove(directory / LATEST)


RESUME_NOTE = ".megatron-ft-resume"
"""File in the folder of ``--save`` with the iteration of the checkpoint to resume from.

Written by megatron_ft.megatron.own_checkpoints.
"""


def wish_of(args: Any) -> tuple[int | None, ...]:
    """Request of the user for what Megatron loads; kept in each snapshot, so that a change shows.

    The checkpoint's iteration, and the one that training is to continue with if that is given.
    """
    override = getattr(args, "override_ckpt_iteration", None)
    return (getattr(args, "ckpt_step", None), *([] if override is None else [override]))


def disk_of(args: Any) -> DiskStart:
    """Checkpoint on disk that Megatron would load.

    With ``--finetune``, a release, or ``--pretrained-checkpoint`` it starts at iteration 0,
    and with ``--override-ckpt-iteration`` at that one, whatever the number of the checkpoint
    that it reads.
    """
    directory = getattr(args, "load", None)
    if not directory:
        return DiskStart(0 if getattr(args, "pretrained_checkpoint", None) else -1)
    if getattr(args, "finetune", False):
        return DiskStart(0)
    step, override = (
        getattr(args, "ckpt_step", None),
        getattr(args, "override_ckpt_iteration", None),
    )
    found = step or tracked_iteration(Path(directory, TRACKER))
    if found < 0:
        return DiskStart(-1)
    asked = [f"--ckpt-step {step}"] if step else []
    if override is None:
        return DiskStart(found, " ".join(asked), noted(Path(directory)) == found)
    return DiskStart(override, " ".join([*asked, f"--override-ckpt-iteration {override}"]), False)


def tracked_iteration(tracker: Path) -> int:
    """The iteration that a tracker file names, 0 for a release.

    -1 if there is no such file, or if its storage does not answer: memory serves then.
    """
    try:
        word = tracker.read_text(errors="replace").strip()
    except OSError:
        return -1
    return int(word) if word.isdigit() else 0


def noted(folder: Path) -> int:
    """The iteration whose checkpoint in this folder is to be resumed from, -1 for none."""
    try:
        word = _word(folder / RESUME_NOTE)
    except OSError:
        return -1
    return int(word) if word.isdigit() else -1
