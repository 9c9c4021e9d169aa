"""accelerate.Accelerator with DeepSpeed: its whole state in snapshots, by one object.

Accelerate's own checkpoints know neither the step nor the place in the data.  Here both are in the
snapshot, and so are its schedulers, registered objects and random states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_ext.client_state import CLIENT, set_client_state
from deepspeed_ext.hooks import run_of
from deepspeed_ext.state_parts import drawn
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_position import EpochNumbers, LoaderPosition

NAME = "accelerate.Accelerator"


class InMemoryState:
    """The state of an ``accelerator`` in snapshots; make it behind ``accelerator.prepare``.

    Prepared loaders are then read as before, and continue where training stood.  Call ``resume``
    once, before the first batch, and ``save`` at the end of every step, when its schedulers have
    stepped too.  ConfigError without one prepared engine that takes snapshots.
    """

    def __init__(self, accelerator: Any) -> None:
        engines = [(model, run_of(model)) for model in accelerator._models]
        found = [(model, run) for model, run in engines if run is not None]
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} prepared models take snapshots: InMemoryState needs one, prepared "
                'with a DeepSpeedPlugin whose config has "inmem_snapshot"'
            )
        self._accelerator, ((self._engine, self._run),) = accelerator, found
        self._run.client_ends = True
        self._positions = [_watch(loader) for loader in accelerator._dataloaders]
        set_client_state(self._engine, self._entries)

    def resume(self, checkpoint: str | None = None) -> int:
        """The step that training continues from: of memory, of ``checkpoint``, a folder of
        ``accelerator.save_state``, if that is newer, or else 0.  Collective."""
        state = self._run.serve(NAME, checkpoint or os.devnull)
        if state is not None:
            for part, stored in zip(self._parts(), state["parts"], strict=True):
                part.load_state_dict(stored)
            self._accelerator.step = state["step"]
        elif checkpoint is not None:
            self._accelerator.load_state(checkpoint)
        return int(self._engine.global_steps)

    def save(self) -> None:
        """A step has ended, with all that belongs to it."""
        reason = ""
        if not any(position.is_read for position in self._positions):
            reason = "no prepared loader is being read; skip_first_batches makes another"
        elif any(position.draws for position in self._positions):
            reason = "reading its data draws random numbers in the training process"
        self._run.refuse(reason)
        self._run.end_iteration()

    def _parts(self) -> list[Any]:
        """All that has a state beside the engine, in an order that every incarnation has."""
        own = getattr(self._engine, "lr_scheduler", None)
        schedulers = [one for one in self._accelerator._schedulers if one.scheduler is not own]
        return [*schedulers, *self._accelerator._custom_objects]

    def _entries(self) -> Mapping[str, Any]:
        parts = [part.state_dict() for part in self._parts()]
        return {CLIENT: NAME, "parts": parts, "step": self._accelerator.step}


class _AsPrepared:
    """A prepared loader with its own way to iterate, which counts passes by ``iteration``."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._kind = loader, type(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kind.__iter__(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property
    def epoch(self) -> int:
        return int(self._loader.iteration)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._loader.iteration = value


class PreparedPosition(LoaderPosition):
    """The position of a prepared loader, whose samplers follow its ``iteration``."""

    def __init__(self, loader: _AsPrepared) -> None:
        super().__init__(loader)
        self._epochs, self.draws = EpochNumbers([loader]), False

    @property
    def is_read(self) -> bool:
        """True in the middle of a pass."""
        return self._consumed is not None

    def _batches(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        """Note batches made by chance; the first one begins a pass, and draws its order."""
        inner, end, before = super()._batches(number, batches), object(), None
        while (batch := next(inner, end)) is not end:
            self.draws |= before is not None and before != drawn()
            yield batch
            before = drawn()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ever; behind the last batch of a pass, the next pass comes."""
        super().load_state_dict(state)
        if self._pending is not None and state["consumed"] == len(self.loader):
            self._pending = None
            self.loader.epoch = state["begun"]["epochs"][0] + 1
            self.set_now(state["now"])


def _watch(loader: Any) -> PreparedPosition:
    """Have a prepared loader keep its position, in its place."""
    position = PreparedPosition(_AsPrepared(loader))
    kind = type(loader)
    watched = type(kind.__name__, (kind,), {"__iter__": lambda _: position.begin()})
    # Not by assignment: Accelerate's classes have a property of that name.
    vars(object)["__class__"].__set__(loader, watched)
    resumable_loader.register(position)
    return position
