"""The arena that one rank captures into, and the layout of its state there.

Both may change while training runs.  Where names or forms of the state differ from the layout, it
is planned anew at the boundary of a capture.  Where a slot has no room for it, the job is asked for
larger arenas; the rank goes into its new one at a boundary, and no iteration waits for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_ft.arena.limits import format_bytes
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import encode
from megatron_ft.core.shard import ShardLayout, pack_encoded, plan_layout
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import TrainerClient
from megatron_ft.trainer.binding import LayoutBinding, layout_changed
from megatron_ft.trainer.engine import CaptureEngine, required_bytes, with_spare
from megatron_ft.trainer.pending_restore import RestoredShard
from megatron_ft.trainer.plan import check_replicas, plan_state
from megatron_ft.trainer.state import (
    KnowsMemory,
    RemembersMore,
    TrainingState,
    form_of,
    live_tensors,
)
from megatron_ft.trainer.stats import Warner

logger = logging.getLogger(__name__)

FRAME_BYTES = 64
"""More than the frame around layout, objects and form in the bytes behind the tensors."""

SPARE_PART = 4
"""A state that outgrows its arena again gets room for one such part of its tensors more."""


class PlannedState(NamedTuple):
    """The layout and the checkpoint form of a state, and the bytes that its slots need."""

    layout: ShardLayout
    form: bytes
    required_bytes: int


def plan_start(state: TrainingState, restored: RestoredShard | None, warn: Warner) -> PlannedState:
    """Plan the layout for the first arena of this process.

    Raises what ``plan_covered`` and ``check_replicas`` can raise, and UnencodableError.  Behind a
    restore the same start would fail again and again.  So there the layout is empty, and it is
    planned at the boundary of each capture until it can be.
    """
    form = b""
    try:
        form, layout = form_of(state), plan_covered(state)
        layout = _agreed(state, layout, restored, warn)
        return PlannedState(layout, form, required_bytes(layout, state.objects(), form))
    except Exception as error:
        # Other ranks of a group wait for this one to compare replicas.
        if restored is None or state.replicas():
            raise
        text = "the state cannot be captured now: %s; training continues without snapshots until "
        warn("plan", text + "it can", error)
        return PlannedState(plan_layout(()), form, restored.used_bytes)


def plan_covered(state: TrainingState, like: ShardLayout | None = None) -> ShardLayout:
    """As ``plan_state``; ConfigError too for a tensor that trains and would not be captured."""
    layout = plan_state(state, like=like)
    if isinstance(state, KnowsMemory):
        state.require_covered()
    return layout


def _agreed(
    state: TrainingState, layout: ShardLayout, restored: RestoredShard | None, warn: Warner
) -> ShardLayout:
    """The layout if replicas are equal; behind a restore one in which each rank has its own."""
    try:
        check_replicas(state, layout)
        return layout
    except ConfigError as error:
        if restored is None:
            raise
        warn("replicas", "%s. Each rank captures all of them until then", error)
        return plan_state(state, like=plan_layout(()))


MakeEngine = Callable[[Path, ShardLayout], CaptureEngine]


class CaptureArena:
    """One rank's engine, replaced when the job has made another arena.

    Calling sequence: ``open`` once; at each boundary where no capture runs ``move``, and ``fit``
    before a capture; ``close``.  ``engine`` is None while the rank is between two arenas.
    """

    def __init__(self, client: TrainerClient, warn: Warner, on_change: Callable[[], None]) -> None:
        """``on_change`` is called when the state is captured in another layout."""
        self.engine: CaptureEngine | None = None
        self.is_open = False
        self._client, self._warn, self._on_change = client, warn, on_change
        self._form = b""
        self._layout = plan_layout(())
        self._make: MakeEngine | None = None
        self._mover: threading.Thread | None = None
        self._given: Path | None = None
        self._leaving: CaptureEngine | None = None
        self._left: LayoutBinding | None = None
        self._moves, self._arrived = 0, False
        client.on_arena = self._on_arena

    def open(self, make: MakeEngine, path: Path, layout: ShardLayout, form: bytes) -> None:
        """Map the arena at ``path`` by ``make``; ``form`` is stored with each snapshot."""
        self.engine = make(path, layout)
        self._make, self._layout, self._form, self.is_open = make, layout, form, True

    def fit(self, state: TrainingState) -> tuple[Mapping[str, torch.Tensor], Callable[[], bytes]]:
        """The live tensors, and what gives the bytes behind them in the slot.

        The objects are encoded now, as training continues with them; the copy thread packs them
        with the layout.  ValueError if a slot has no room; ConfigError and UnencodableError for
        what cannot be captured.
        """
        engine = self.engine
        assert engine is not None
        live = live_tensors(state)
        if changed := engine.binding.mismatch(live):
            if isinstance(state, RemembersMore):
                state.rescan()
            self._layout, self._form = plan_covered(state, self._layout), form_of(state)
            live = live_tensors(state)
        else:
            self._layout = engine.binding.layout
        layout_bytes = self._layout.to_bytes() if changed else engine.binding.layout_bytes
        objects = encode(state.objects())
        meta_bytes = len(layout_bytes) + len(objects) + len(self._form) + FRAME_BYTES
        if lacking := engine.lacking(self._layout.tensor_bytes, meta_bytes):
            self._ask_for_room(meta_bytes)
            raise ValueError(f"the state has grown: its arena lacks {format_bytes(lacking)}")
        if changed:
            engine.rebind(self._layout, engine.binding)
            if still := engine.binding.mismatch(live):
                raise ValueError(layout_changed(still))
            self._on_change()
            text = "the state has changed (%s): its layout is planned anew, snapshots continue"
            self._warn("layout", text, changed)
        return live, partial(pack_encoded, layout_bytes, objects, self._form)

    def _ask_for_room(self, meta_bytes: int) -> None:
        """Ask for an arena with room for this layout; the supervisor answers by making one."""
        size = self._layout.tensor_bytes
        size += size // SPARE_PART if self._moves else 0
        self._client.send(m.Outgrown(self._client.shard_id, with_spare(size, meta_bytes)))

    def _on_arena(self, path: Path) -> None:
        """In the client's thread: the job has made another arena; this may come twice."""
        self._given = path

    def move(self, timeout_seconds: float) -> None:
        """Go into the arena that the job has made, if any, in a thread: training continues.

        Called while no capture runs.
        """
        given, old = self._given, self.engine
        failed = self._mover is not None and not self._mover.is_alive()
        if given is None or (old is None and not failed):
            return
        self._given = None
        if old is not None and old.arena.in_place():
            self._arrived = True
            return
        self.engine, self._leaving = None, old or self._leaving
        work = partial(self._go, given, timeout_seconds)
        self._mover = threading.Thread(target=work, name="megatron-ft-move", daemon=True)
        self._mover.start()

    def _go(self, path: Path, timeout_seconds: float) -> None:
        assert self._make is not None
        try:
            if self._leaving is not None:
                self._leaving.close(timeout_seconds)
                self._left, self._leaving = self._leaving.binding, None
            assert self._left is not None
            # The layout that was captured before fits into any arena that comes after.
            engine = self._make(path, self._left.layout)
            engine.rebind(self._left.layout, self._left)
        except Exception as error:
            # The job announces the arena to this rank again until it is there.
            text = "%s cannot be used: training continues without snapshots until it can"
            logger.warning(text, path, exc_info=True)
            self._client.send(m.Unattached(self._client.shard_id, repr(error)))
            return
        self._moves += 1
        self._arrived, self.engine = True, engine

    def publish(self, iteration: int) -> None:
        """Write the progress of this rank, and report that it is in its new arena."""
        assert self.engine is not None
        self.engine.arena.write_progress(iteration)
        if self._arrived:
            self._arrived = False
            self._client.send(m.Attached(self._client.shard_id))

    def forget_tensors(self) -> None:
        if self.engine is not None:
            self.engine.binding.forget()

    def close(self, timeout_seconds: float) -> None:
        """Unmap the arena; no capture is running.  A second call does nothing."""
        if self._mover is not None:
            self._mover.join()
        if self.engine is not None:
            self.engine.close(timeout_seconds)
        self.engine, self.is_open = None, False
