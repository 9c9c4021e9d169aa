"""Names and places of the training framework's own checkpoints; what they hold is not read."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.disk.durable import Disk

TRACKER = "latest_checkpointed_iteration.txt"


def newest_checkpoint(directory: Path | None) -> Path | None:
    """The newest complete checkpoint of Megatron-LM in ``directory``, or None.

    Megatron writes its tracker file after everything else, so the checkpoint that it
    names is complete (megatron/training/checkpointing.py, get_checkpoint_tracker_filename).
    """
    if directory is None:
        return None
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    word = tracker.read_text().strip()
    if word != "release" and not word.isdigit():
        return None
    found = directory / word if word == "release" else checkpoint_folder(directory, int(word))
    return found if found.is_dir() and any(found.iterdir()) else None


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
