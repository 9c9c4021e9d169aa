"""Names and places of the training framework's own checkpoints; what they hold is not read."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.disk.durable import Disk

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
    tracker = directory / TRACKER
    word = tracker.read_text().strip() if tracker.is_file() else ""
    if word == "release":
        return directory / word
    return checkpoint_folder(directory, int(word)) if word.isdigit() else None


def latest_tag(directory: Path) -> str:
    """The tag that DeepSpeed's ``latest`` names, '' if it names none that is a name of a folder."""
    latest = directory / LATEST
    tag = latest.read_text().strip() if latest.is_file() else ""
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


def checkpoint_folder(directory: Path, iteration: int) -> Path:
    """Where Megatron-LM keeps the checkpoint of an iteration (``get_checkpoint_name`` there)."""
    return directory / f"iter_{iteration:07d}"


def point_tracker(directory: Path, iteration: int) -> None:
    """Have Megatron-LM load this iteration, unless the folder holds a newer one already."""
    tracker = directory / TRACKER
    known = tracker.read_text().strip() if tracker.is_file() else ""
    if known.isdigit() and int(known) > iteration:
        return
    Disk().write_file(tracker, [str(iteration).encode()])


def retract(directory: Path, checkpoint: Path) -> None:
    """Have no framework load this checkpoint: what names it as the newest one is removed."""
    if _newest_of_megatron(directory) == checkpoint:
        Disk().remove(directory / TRACKER)
    if latest_tag(directory) == checkpoint.name:
        Disk().remove(directory / LATEST)
