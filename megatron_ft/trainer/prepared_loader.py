"""The position of a data loader of ``accelerator.prepare``, which stays in its own place.

Accelerate's loaders draw their order anew in every pass, by a count of passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_position import (
    EpochNumbers,
    LoaderPosition,
    dropped,
    sampler_name,
    skipping,
)
from megatron_ft.trainer.state import drawn


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
    def dispatches(self) -> bool:
        """True if the first rank reads for all."""
        return bool(self._kind.__name__ == "DataLoaderDispatcher")

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
        """Record whether making a batch draws random numbers, but for a pass's first batch."""
        inner, end, before = super()._batches(number, batches), object(), None
        while (batch := next(inner, end)) is not end:
            self.draws |= before is not None and before != drawn()
            yield batch
            before = drawn()

    def _skip(self, consumed: int, first_pass: bool) -> Iterator[Any]:
        """Skip in the sampler, but for the last used batch: the loader reads one ahead."""
        loader, base = self.loader, self.loader.base_dataloader
        reads_all = loader.dispatches or loader.use_stateful_dataloader or not consumed
        if not (name := "" if reads_all else sampler_name(base)):
            return super()._skip(consumed, first_pass)
        with skipping(base, name, consumed - 1, first_pass):
            return dropped(iter(self.loader), 1)

    def state_dict(self) -> dict[str, Any]:
        """The place, and whether the last batch was read: only Accelerate knows it of a stream."""
        return {"ended": self.loader.end_of_dataloader, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the place; after the last batch of a pass the next pass begins."""
        super().load_state_dict(state)
        if self._pending is not None and state["ended"]:
            self._pending = None
            self.loader.epoch = state["begun"]["epochs"][0] + 1
            self.set_now(state["now"])


def watch(loader: Any) -> PreparedPosition:
    """Make a prepared loader keep its position."""
    position = PreparedPosition(_AsPrepared(loader))
    kind = type(loader)
    watched = type(kind.__name__, (kind,), {"__iter__": lambda _: position.begin()})
    # Not by assignment: Accelerate's classes have a property of that name.
    vars(object)["__class__"].__set__(loader, watched)
    resumable_loader.register(position)
    return position
