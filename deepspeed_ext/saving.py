"""The user's own ``save_checkpoint``: DeepSpeed's files, and a ``latest`` that can be trusted."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from deepspeed_ext import client_state
from deepspeed_ext.checkpoint_engine import SnapshotCheckpointEngine
from deepspeed_ext.client_state import PerEngine
from megatron_ft.checkpoint.native import step_of_tag

NAME = "last_save"
"""Name of :class:`LastSave` among the parts of a snapshot."""


class Saved(NamedTuple):
    """A checkpoint that ``latest`` was made to name, and the global step it holds.

    ``folder`` is resolved: a tag says nothing without the folder that it is in.
    """

    folder: str
    tag: str
    step: int


_last: PerEngine[Saved] = PerEngine()


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
        _last.set(engine, Saved(folder, tag, engine.global_steps))
    return result


def close(engine: Any) -> None:
    """End the inner engine's helpers, as ``engine.destroy`` does where no wrapper is around it."""
    ours = engine.checkpoint_engine
    if isinstance(ours, SnapshotCheckpointEngine) and ours.inner.is_decoupled():
        ours.cleanup()


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
            _last.set(self._engine, Saved(**state))


def step_on_disk(folder: str, tag: str, objects: dict[str, Any]) -> int | None:
    """The global step of the checkpoint with this tag there, or None if that cannot be told.

    ``objects`` are those of the snapshot that it is compared with: a checkpoint that was
    saved before the snapshot is in them.
    """
    known = objects.get(NAME) or {}
    if (known.get("folder"), known.get("tag")) == (os.path.realpath(folder), tag):
        return int(known["step"])
    return step_of_tag(tag)
