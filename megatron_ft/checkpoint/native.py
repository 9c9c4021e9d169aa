"""Names and places of the training framework's own checkpoints; what they hold is not read."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.checkpoint.durable import Disk

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
    """What a small file says, '' if there is none; after a power loss it may hold anything."""
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _is_iteration(word: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", word) is not None


def naming(directory: Path) -> str:
    """What tells one naming of a newest checkpoint from all others; '' if none is named.

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
    """Where Megatron-LM keeps the checkpoint of an iteration (``get_checkpoint_name`` there)."""
    return directory / f"iter_{iteration:07d}"


def point_tracker(directory: Path, iteration: int) -> None:
    """Have Megatron-LM load this iteration, unless the folder holds a newer one already."""
    known = _word(directory / TRACKER)
    if _is_iteration(known) and int(known) > iteration:
        return
    Disk().write_file(directory / TRACKER, [str(iteration).encode()])


def retract(directory: Path, checkpoint: Path) -> None:
    """Have no framework load this checkpoint: what names it as the newest one is removed."""
    if _newest_of_megatron(directory) == checkpoint:
        Disk().remove(directory / TRACKER)
    if latest_tag(directory) == checkpoint.name:
        Disk().remove(directory / LATEST)
