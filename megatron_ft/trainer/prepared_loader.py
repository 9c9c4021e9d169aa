"""The position of a data loader of ``accelerator.prepare``, which stays in its own place.

Accelerate's loaders draw their order anew in every pass, by a count of passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_position import LoaderPosition
from megatron_ft.trainer.loader_trace import sampler_name


class _AsPrepared:
    """A prepared loader with its own way to iterate, which counts passes by ``iteration``."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.kind = loader, type(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kind.__iter__(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, "iteration" if name == "epoch" else name)


class PreparedPosition(LoaderPosition):
    """The position of a prepared loader, whose samplers follow its ``iteration``."""

    reads_ahead = 1

    def __init__(self, loader: _AsPrepared) -> None:
        base = loader.base_dataloader
        # The first rank reads for all.
        dispatches = loader.kind.__name__ == "DataLoaderDispatcher"
        reads_all = dispatches or loader.use_stateful_dataloader
        super().__init__(loader, base, "" if reads_all else sampler_name(base))

    def _numbered(self) -> list[Any]:
        return [self.loader]

    @property
    def is_read(self) -> bool:
        return self._at is not None

    @property
    def draws(self) -> bool:
        """True if making a batch, but a pass's first, draws random numbers in this process."""
        return self._draws.draws

    def _workers_are_behind(self) -> bool:
        # The number of the pass; only Accelerate's own samplers and such a data set follow it.
        return hasattr(self._holder.dataset, "set_epoch") and super()._workers_are_behind()

    def state_dict(self) -> dict[str, Any]:
        """The place; behind the last batch, which only Accelerate knows of a stream, the next
        pass's begin."""
        state = super().state_dict()
        if self._pending is not None or state["consumed"] is None:
            return state
        if not self.loader.end_of_dataloader:
            return state
        begun = {**self._moment(), "epochs": [self.loader.epoch + 1]}
        return {**state, "begun": begun, "consumed": None}


def watch(loader: Any) -> PreparedPosition:
    position = PreparedPosition(_AsPrepared(loader))
    kind = type(loader)
    own = {"__iter__": lambda _: position.new_pass(), "__module__": kind.__module__}
    watched = type(kind.__name__, (kind,), own)
    # Not by assignment: Accelerate's classes have a property of that name.
    vars(object)["__class__"].__set__(loader, watched)
    resumable_loader.register(position)
    return position
