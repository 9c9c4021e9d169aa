"""Checkpoints that the training framework wrote itself: only found here, never read."""

from __future__ import annotations

from pathlib import Path

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
    name = word if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else ""
    found = directory / name
    return found if name and found.is_dir() and any(found.iterdir()) else None
