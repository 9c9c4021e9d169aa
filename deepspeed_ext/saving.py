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
from weakref import WeakKeyDictionary

from deepspeed_ext import client_state
from deepspeed_ext.checkpoint_engine import SnapshotCheckpointEngine
from megatron_ft.checkpoint.native import step_of_tag
from megatron_ft.trainer.start_choice import WISH, DiskStart

logger = logging.getLogger(__name__)

NAME = "last_save"
"""Name of :class:`LastSave` among the parts of a snapshot."""


class Saved(NamedTuple):
    """A checkpoint that ``latest`` was made to name, and the global step it holds.

    ``folder`` is resolved: a tag says nothing without the folder that it is in.
    """

    folder: str
    tag: str
    step: int


_last: WeakKeyDictionary[Any, Saved] = WeakKeyDictionary()


def wrap_checkpoint_engine(engine: Any) -> None:
    """Put ours around the checkpoint engine that DeepSpeed chose; a second call changes nothing.

    DeepSpeed has none for ZeRO-3 without an optimizer.
    """
    inner = engine.checkpoint_engine
    if inner is not None and not isinstance(inner, SnapshotCheckpointEngine):
        engine.checkpoint_engine = SnapshotCheckpointEngine(inner)


def save_checkpoint(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``engine.save_checkpoint`` with ``latest`` written after every rank has committed.

    Collective, as the original.  If a rank fails, every rank raises: that one its own error,
    the others CheckpointSaveError; ``latest`` then stays as it was.
    """
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    client_state.given(engine, given.arguments["client_state"])
    ours = engine.checkpoint_engine
    if not isinstance(ours, SnapshotCheckpointEngine):
        return original(*args, **kwargs)
    publishes = bool(given.arguments["save_latest"])
    given.arguments["save_latest"] = False
    with ours.publishing(publishes, _writes_latest(engine)):
        result = original(*given.args, **given.kwargs)
    if publishes:
        tag = given.arguments["tag"]
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = os.path.realpath(given.arguments["save_dir"])
        _last[engine] = Saved(folder, tag, engine.global_steps)
    return result


def _writes_latest(engine: Any) -> bool:
    # DeepSpeed's rank 0 alone writes it, also where each node has a folder of its own; then
    # no other node could load.
    return bool((engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0)


class LastSave:
    """Remembers with each snapshot which checkpoint ``latest`` named, and its step.

    A tag is a free text, so without this only ``global_step<N>`` could be compared with the
    step of a snapshot.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """The last save of this incarnation or of those it descends from; {} if there was none."""
        saved = _last.get(self._engine)
        return saved._asdict() if saved else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier incarnation saved."""
        if state:
            _last[self._engine] = Saved(**state)


def step_on_disk(folder: str, tag: str, objects: dict[str, Any]) -> int | None:
    """The global step of the checkpoint with this tag there, or None if that cannot be told.

    ``objects`` are those of the snapshot that it is compared with: a checkpoint that was
    saved before the snapshot is in them.
    """
    known = objects.get(NAME) or {}
    if (known.get("folder"), known.get("tag")) == (os.path.realpath(folder), tag):
        return int(known["step"])
    return step_of_tag(tag)


class LoadWish:
    """The folder, tag and step of what the script named, kept in each snapshot.

    A tag without its folder names nothing: some clients save every checkpoint with one tag, each
    in a folder of its own.  And one name may have been saved again, with a later step.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._tag: str | None = None
        self._step = -1

    def name(self, folder: str, tag: str | None) -> None:
        """The script asks for this, the newest of the folder if ``tag`` is None."""
        self._folder, self._tag = os.path.realpath(folder), tag

    def is_new(self, found: str, step: int, offered: int, objects: Mapping[str, Any]) -> bool:
        """True if the script wants another checkpoint than in the incarnation of the snapshot.

        ``found`` and ``step`` (-1: nothing is there) are of what DeepSpeed would load,
        ``offered`` and ``objects`` of the snapshot.  A checkpoint that its own lineage has
        saved since, under the name that was given before or as the newest, is no other.
        """
        self._step = -1 if self._tag is None else step
        before = objects.get(WISH) or {}
        same_name = (before.get("folder"), before.get("tag")) == (self._folder, self._tag)
        if step < 0 or (same_name and self._step == before.get("step")):
            return False
        saved = Saved(self._folder, found, step)._asdict()
        own = objects.get(NAME) == saved and step <= offered
        return not (own and (same_name or self._tag is None))

    def state_dict(self) -> dict[str, Any]:
        """The names and the step; -1 without a tag, as the newest one changes."""
        return {"folder": self._folder, "tag": self._tag, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: each incarnation asks for itself."""


def tag_on_disk(engine: Any, load_dir: str, tag: str | None) -> str:
    """The tag of the checkpoint that DeepSpeed would load, '' if it would load none."""
    folder = Path(load_dir)
    found = _content(_latest_of(engine, folder)) if tag is None else str(tag)
    return found if found and (folder / found).is_dir() else ""


def disk_of(engine: Any, load_dir: str, tag: str | None, objects: Mapping[str, Any]) -> DiskStart:
    """The step of the checkpoint that DeepSpeed would load, and whether the script named it.

    A tag that is none of DeepSpeed's own says nothing of its step, which is read from the
    checkpoint.  What the snapshot's ``objects`` know of an earlier save counts where the script
    has begun to overwrite that, and did not end.
    """
    folder, found = Path(load_dir), tag_on_disk(engine, load_dir, tag)
    if not found:
        return DiskStart(-1)
    step = step_on_disk(load_dir, found, dict(objects))
    whole = _is_whole(folder / found, _latest_of(engine, folder))
    if step is None or (step_of_tag(found) is None and whole):
        step = _step_inside(folder / found, step or 0)
    return DiskStart(step, "" if tag is None else f"the checkpoint {found!r}")


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
        # Mapped, so that only what is looked at is read.  It is the user's own checkpoint, which
        # DeepSpeed is about to unpickle as well.
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except Exception:
        logger.warning("%s cannot be read, so its step is not known", file, exc_info=True)
        return otherwise
    return int(content.get("global_steps", otherwise))
