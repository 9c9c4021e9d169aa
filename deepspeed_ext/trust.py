"""The decision if a script may be handed an engine of another step than its own checkpoint's.

An engine from memory stands at the snapshot's step.  Whatever the script keeps outside the engine
(counters, schedulers, the position in the data) must come to the same step, or training goes wrong
without an error.  Only the script, or an adapter of it, can promise that.

State that training keeps outside the engine, as far as it shows.

The checkpoint that the script names when it loads.

What ``load_checkpoint`` would start from by itself.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext import saving
from deepspeed_ext.saving import step_on_disk
from megatron_ft.checkpoint.native import step_of_tag
from megatron_ft.config.json_section import FOLLOWS_ENGINE
from megatron_ft.trainer.manager import active_clients
from megatron_ft.trainer.start_choice import WISH, DiskStart

NAME = "outside"
"""Name of :class:`Outside` among the parts of a snapshot."""

_SCHEDULER_MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""What torch's schedulers leave at the ``step`` of their optimizer; the second up to torch 2.3."""


class Outside:
    """Names the clients, schedulers and optimizers around one engine; goes into each snapshot.

    Some of it shows only in training: a scheduler may be made after the load, a second
    optimizer is known when it steps.  So a later incarnation reads of it in the snapshot.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._found: set[str] = set()
        self._hook: Any = None
        self.look()

    def look(self) -> list[str]:
        """Everything that was found so far, now included."""
        self._found |= active_clients()
        if self._has_foreign_scheduler():
            self._found.add("a learning rate scheduler that deepspeed.initialize did not get")
        return sorted(self._found)

    def watch_optimizers(self, own: Callable[[], list[Any]]) -> None:
        """See every optimizer of torch that steps from now on; ``own`` gives the engine's."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        known = weakref.WeakSet(own())

        def stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if optimizer not in known and optimizer not in own():
                self._found.add(f"a second optimizer ({type(optimizer).__name__})")
            known.add(optimizer)

        self._hook = register_optimizer_step_pre_hook(stepping)

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """The names."""
        return {"found": self.look()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each incarnation looks for itself."""

    def _has_foreign_scheduler(self) -> bool:
        from torch.optim.lr_scheduler import LRScheduler

        step = getattr(getattr(self._engine, "basic_optimizer", None), "step", None)
        marked = any(hasattr(step, mark) for mark in _SCHEDULER_MARKS)
        return marked and not isinstance(self._engine.lr_scheduler, LRScheduler)


_WITH_FUNCTION = (
    "give this state to deepspeed_ext.set_client_state(engine, function) before training, and set "
    "it from the client_state that engine.load_checkpoint returns at every start"
)


class Client(NamedTuple):
    """All that is known of the script around an engine.

    ``follows`` is True if its configuration says that it follows the engine's counters,
    ``provided`` if a function of it gives its state to each snapshot.  ``outside`` names what
    keeps state that no snapshot holds.
    """

    follows: bool = False
    provided: bool = False
    outside: Sequence[str] = ()


def objection(client: Client) -> str:
    """Why no snapshot may serve this client, and what to do about it; '' if one may."""
    if client.provided:
        return ""
    if client.outside:
        return (
            f"no snapshot holds the state of {', '.join(client.outside)}. For restarts from "
            f"memory {_WITH_FUNCTION}"
        )
    if client.follows:
        return ""
    return (
        "nothing says that the script follows the engine's step. If its loop and its data follow "
        f'from engine.global_steps, add "{FOLLOWS_ENGINE}": true to the inmem_snapshot section; '
        f"else {_WITH_FUNCTION}"
    )


class Wish:
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
        saved = saving.Saved(self._folder, found, step)._asdict()
        own = objects.get(saving.NAME) == saved and step <= offered
        return not (own and (same_name or self._tag is None))

    def state_dict(self) -> dict[str, Any]:
        """The names and the step; -1 without a tag, as the newest one changes."""
        return {"folder": self._folder, "tag": self._tag, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: each incarnation asks for itself."""


logger = logging.getLogger(__name__)


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
