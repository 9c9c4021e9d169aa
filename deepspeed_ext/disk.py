"""What ``load_checkpoint`` would start from by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_ext.saving import step_on_disk
from megatron_ft.recovery.start import Disk


def disk_of(engine: Any, load_dir: str, tag: str | None, objects: Mapping[str, Any]) -> Disk:
    """The step of the checkpoint that DeepSpeed would load, and whether the script named it.

    A tag that is none of DeepSpeed's own says nothing of its step: the snapshot's ``objects``
    know it if it was saved before, else it is read from the checkpoint.
    """
    folder = Path(load_dir)
    found = _latest(engine, folder) if tag is None else str(tag)
    if not found or not (folder / found).is_dir():
        return Disk(-1)
    step = step_on_disk(found, dict(objects))
    if step is None:
        step = _step_inside(folder / found)
    return Disk(step, "" if tag is None else f"the checkpoint {found!r}")


def _latest(engine: Any, folder: Path) -> str:
    name = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return ""


def _step_inside(checkpoint: Path) -> int:
    import torch

    files = sorted(checkpoint.glob("*mp_rank_*_model_states.pt"))
    if not files:
        return 0
    # Mapped, so that only what is looked at is read.  It is the user's own checkpoint, which
    # DeepSpeed is about to unpickle as well.
    content = torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)
    return int(content.get("global_steps", 0))
