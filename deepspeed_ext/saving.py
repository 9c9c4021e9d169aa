"""The script's own checkpoints: saved with a ``latest`` that can be trusted, and found by a load.

A save goes through DeepSpeed; ``latest`` is written once every rank has committed.  Before a load,
this module finds the step of what DeepSpeed would load, and whether the script asks for another
checkpoint than it did when the snapshot was taken.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.checkpoint.native import step_of_tag
from megatron_ft.trainer.start_choice import WISH, DiskStart

logger = logging.getLogger(__name__)


class Named(NamedTuple):
    """A checkpoint by its resolved folder and its tag, None for the newest, and its global step.

    A tag without its folder names nothing: some clients save every checkpoint with one tag, each
    in a folder of its own.  And one name may be saved again, with a later step.
    """

    folder: str
    tag: str | None
    step: int


def wrap_checkpoint_engine(engine: Any) -> None:
    """Put ours around the checkpoint engine that DeepSpeed chose; a second call changes nothing."""
    from deepspeed_ext.checkpoint_engine import SnapshotCheckpointEngine  # it imports DeepSpeed

    inner = engine.checkpoint_engine
    if not isinstance(inner, SnapshotCheckpointEngine):
        engine.checkpoint_engine = SnapshotCheckpointEngine(inner)


class Checkpoints:
    """The part of a snapshot that says what the script saved last, and what it asked to load.

    A tag is a free text, so without the last save only ``global_step<N>`` could be compared with
    the step of a snapshot.
    """

    def __init__(self, engine: Any, asked: Named | None = None) -> None:
        self._engine = engine
        self.saved: Named | None = None
        self.asked = asked

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``engine.save_checkpoint`` with ``latest`` written after every rank has committed.

        Collective, as the original.  If a rank fails, every rank raises: that one its own error,
        the others CheckpointSaveError; ``latest`` then stays as it was.
        """
        from deepspeed_ext.checkpoint_engine import SnapshotCheckpointEngine  # it imports DeepSpeed

        engine = self._engine
        if not isinstance(engine.checkpoint_engine, SnapshotCheckpointEngine):
            # The script has put another one there since.
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        publishes, tag = bool(given.arguments["save_latest"]), given.arguments["tag"]
        given.arguments["save_latest"] = False
        with engine.checkpoint_engine.publishing(publishes, _writes_latest(engine)):
            result = original(*given.args, **given.kwargs)
        if publishes:
            tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
            folder = os.path.realpath(given.arguments["save_dir"])
            self.saved = Named(folder, tag, engine.global_steps)
        return result

    def find(
        self, load_dir: str, tag: str | None, offered: int, objects: Mapping[str, Any]
    ) -> tuple[DiskStart, bool]:
        """The checkpoint that DeepSpeed would load, and whether the script asks for it anew.

        ``offered`` and ``objects`` are of the snapshot that memory offers.  It is anew if the
        script did not ask for it in the incarnation of the snapshot, nor saved it itself since.
        """
        tag = None if tag is None else str(tag)
        before = objects.get(WISH) or {}
        saved, asked = (_named(before.get(name)) for name in ("saved", "asked"))
        disk = disk_of(self._engine, load_dir, tag, saved)
        folder = os.path.realpath(load_dir)
        found = _tag_on_disk(self._engine, load_dir, tag)
        # Of the newest it does not matter how new it was.
        self.asked = Named(folder, tag, -1 if tag is None else disk.iteration)
        same_name = asked is not None and asked[:2] == self.asked[:2]
        # A snapshot of another layout shows its objects only when it is loaded.
        if disk.iteration < 0 or asked == self.asked or not objects:
            return disk, False
        own = saved == Named(folder, found, disk.iteration) and disk.iteration <= offered
        is_new = not (own and (same_name or tag is None))
        if is_new and not disk.asked:
            disk = disk._replace(asked=f"the checkpoint {found!r} in {load_dir}")
        return disk, is_new

    def state_dict(self) -> dict[str, Any]:
        named = {"saved": self.saved, "asked": self.asked}
        return {name: one._asdict() for name, one in named.items() if one is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = _named(state.get("saved")) or self.saved


def _named(state: Mapping[str, Any] | None) -> Named | None:
    return Named(**state) if state else None


def _writes_latest(engine: Any) -> bool:
    # DeepSpeed's rank 0 alone writes it, also where each node has a folder of its own; then
    # no other node could load.
    return bool((engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0)


def disk_of(engine: Any, load_dir: str, tag: str | None, saved: Named | None) -> DiskStart:
    """The step of the checkpoint that DeepSpeed would load, and whether the script named it.

    A tag that is not DeepSpeed's own says nothing of its step, which is read from the
    checkpoint.  What was ``saved`` before counts where the script has begun to overwrite that, and
    did not end.
    """
    folder, found = Path(load_dir), _tag_on_disk(engine, load_dir, tag)
    if not found:
        return DiskStart(-1)
    known = saved is not None and saved[:2] == (os.path.realpath(load_dir), found)
    step = saved.step if saved is not None and known else step_of_tag(found)
    whole = _is_whole(folder / found, _latest_of(engine, folder))
    if step is None or (step_of_tag(found) is None and whole):
        step = _step_inside(folder / found, step or 0)
    return DiskStart(step, "" if tag is None else f"the checkpoint {found!r}")


def _tag_on_disk(engine: Any, load_dir: str, tag: str | None) -> str:
    """The tag of the checkpoint that DeepSpeed would load, '' if it would load none."""
    folder = Path(load_dir)
    found = _content(_latest_of(engine, folder)) if tag is None else str(tag)
    return found if found and (folder / found).is_dir() else ""


def _latest_of(engine: Any, folder: Path) -> Path:
    return folder / ("latest_universal" if engine.load_universal_checkpoint() else "latest")


def _content(latest: Path) -> str:
    try:
        return latest.read_text().strip()
    except OSError:
        return ""


def _is_whole(checkpoint: Path, latest: Path) -> bool:
    """True if nothing in it was written after ``latest``, which is written last."""
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
        # Mapped, so that little of it is read.  It is the user's own checkpoint, which
        # DeepSpeed is about to unpickle as well.
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except Exception:
        logger.warning("%s cannot be read, so its step is not known", file, exc_info=True)
        return otherwise
    return int(content.get("global_steps", otherwise))
