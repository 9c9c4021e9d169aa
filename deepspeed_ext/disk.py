"""What ``load_checkpoint`` would start from by itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_ext.saving import step_on_disk
from megatron_ft.checkpoint.native import step_of_tag
from megatron_ft.trainer.start_choice import Disk

logger = logging.getLogger(__name__)


def tag_on_disk(engine: Any, load_dir: str, tag: str | None) -> str:
    """The tag of the checkpoint that DeepSpeed would load, '' if it would load none."""
    folder = Path(load_dir)
    found = _content(_latest_of(engine, folder)) if tag is None else str(tag)
    return found if found and (folder / found).is_dir() else ""


def disk_of(engine: Any, load_dir: str, tag: str | None, objects: Mapping[str, Any]) -> Disk:
    """The step of the checkpoint that DeepSpeed would load, and whether the script named it.

    A tag that is none of DeepSpeed's own says nothing of its step, which is read from the
    checkpoint.  What the snapshot's ``objects`` know of an earlier save counts where the script
    has begun to overwrite that, and did not end.
    """
    folder, found = Path(load_dir), tag_on_disk(engine, load_dir, tag)
    if not found:
        return Disk(-1)
    step = step_on_disk(load_dir, found, dict(objects))
    whole = _is_whole(folder / found, _latest_of(engine, folder))
    if step is None or (step_of_tag(found) is None and whole):
        step = _step_inside(folder / found, step or 0)
    return Disk(step, "" if tag is None else f"the checkpoint {found!r}")


def _latest_of(engine: Any, folder: Path) -> Path:
    return folder / ("latest_universal" if engine.load_universal_checkpoint() else "latest")


def _content(latest: Path) -> str:
    try:
        return latest.read_text().strip()
    except OSError:
        return ""


def _is_whole(checkpoint: Path, latest: Path) -> bool:
    """Whether nothing in it was written after ``latest``, which is written last."""
    try:
        written = max(path.stat().st_mtime_ns for path in checkpoint.iterdir())
        return written <= latest.stat().st_mtime_ns
    except (OSError, ValueError):
        return False


def _step_inside(checkpoint: Path, otherwise: int) -> int:
    """The step in a model's file; ``otherwise`` if none can be read, as DeepSpeed will say."""
    import torch

    # Not those of experts, which know no step.
    names = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_mp_rank_*_model_states.pt")
    file = min((path for name in names for path in checkpoint.glob(name)), default=None)
    if file is None:
        return otherwise
    try:
        # Mapped, so that only what is looked at is read.  It is the user's own checkpoint, which
        # DeepSpeed is about to unpickle as well.
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except Exception:
        logger.warning("%s cannot be read, so its step is not known", file, exc_info=True)
        return otherwise
    return int(content.get("global_steps", otherwise))
