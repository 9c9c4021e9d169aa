"""The position of a data loader of ``accelerator.prepare``, which stays in its own place.

Accelerate's loaders draw their order anew in every pass, by a count of passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_order import READERS
from megatron_ft.trainer.loader_position import LoaderPosition, Pass
from megatron_ft.trainer.loader_trace import (
    BatchTrace,
    TracedSampler,
    dropped,
    is_right,
    new_workers,
    sampler_name,
    tracing,
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
        self.draws = False
        self._base = loader.base_dataloader
        reads_all = loader.dispatches or loader.use_stateful_dataloader
        self._attribute = "" if reads_all else sampler_name(self._base)
        if self._attribute:
            self._sampler = TracedSampler(vars(self._base)[self._attribute], 1, None)

    def _numbered(self) -> list[Any]:
        return [self.loader]

    @property
    def is_read(self) -> bool:
        """True in the middle of a pass."""
        return self._consumed is not None

    def _batches(self, one: Pass) -> Iterator[Any]:
        """Record whether making a batch draws random numbers, but for a pass's first batch."""
        inner, end, before = super()._batches(one), object(), None
        while (batch := next(inner, end)) is not end:
            self.draws |= before is not None and before != drawn()
            yield batch
            before = drawn()

    def _fresh(self, place: dict[str, Any] | None = None) -> tuple[Iterator[Any], Any]:
        if place is not None:
            new_workers(self._base, True)
        return iter(self.loader), None if self._attribute else BatchTrace()

    def _next(self, one: Pass, end: object) -> Any:
        if one.trace is not None:
            return next(one.batches, end)
        # The loader makes its iterator as it gives its first batch.
        one.trace = self._sampler.begin()
        with tracing(self._base, self._attribute, self._sampler):
            return next(one.batches, end)

    def _can_skip(self) -> bool:
        # The loader reads a batch ahead: with generators of a data set as they were before it.
        return bool(self._attribute) and not self._own.generators_of(READERS)

    def _skipping(self, place: dict[str, Any], afresh: bool) -> Pass | None:
        """Skip in the sampler, but for the last used batch: the loader reads one ahead."""
        if not place["consumed"]:
            return self._reading(place, afresh)
        self._own.set(place["begun"]["own"], afresh=afresh)
        trace = self._sampler.begin(place["consumed"] - 1)
        changed = new_workers(self._base, place["begun"]["first"])
        with tracing(self._base, self._attribute, self._sampler, **changed):
            batches = dropped(iter(self.loader), 1)
        trace.took(None)
        return Pass(place["begun"], batches, trace) if is_right(trace, place["trace"]) else None

    def _reading(self, place: dict[str, Any], afresh: bool) -> Pass | None:
        self._own.set(place["begun"]["own"], afresh=afresh)
        one, end = Pass(place["begun"], *self._fresh(place)), object()
        for _ in range(place["consumed"]):
            if (batch := self._next(one, end)) is end or one.trace is None:
                break
            one.trace.took(batch)
        return one if is_right(one.trace, place["trace"]) else None

    def state_dict(self) -> dict[str, Any]:
        """The place, and whether the last batch was read: only Accelerate knows it of a stream."""
        state, ended = super().state_dict(), self.loader.end_of_dataloader
        if ended and self._pending is None:
            state["now"] = self._own.moment()
        return {**state, "ended": ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the place; after the last batch of a pass the next pass begins."""
        super().load_state_dict(state)
        if self._pending is not None and state["ended"]:
            self._pending = None
            self.loader.epoch = state["begun"]["epochs"][0] + 1
            self._own.set(state["now"], between=True)
            self._stale = self._at


def watch(loader: Any) -> PreparedPosition:
    """Make a prepared loader keep its position."""
    position = PreparedPosition(_AsPrepared(loader))
    kind = type(loader)
    own = {"__iter__": lambda _: position.begin(), "__module__": kind.__module__}
    watched = type(kind.__name__, (kind,), own)
    # Not by assignment: Accelerate's classes have a property of that name.
    vars(object)["__class__"].__set__(loader, watched)
    resumable_loader.register(position)
    return position
