"""The position of a loader whose sampler can skip: what it has used is not read again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ft.trainer.loader_order import samplers_of
from megatron_ft.trainer.loader_position import LoaderPosition, Pass
from megatron_ft.trainer.loader_trace import (
    TracedSampler,
    is_right,
    new_workers,
    tracing,
    workers_of,
)


class SamplerPosition(LoaderPosition):
    """A loader whose sampler, its attribute ``name``, gives ``items`` for each batch: it skips."""

    def __init__(self, loader: Any, name: str, items: int) -> None:
        super().__init__(loader)
        self._attribute, self._items = name, items
        known = (type(one).__module__.partition(".")[0] for one in samplers_of(loader))
        draws = None if {*known} <= {"torch", "deepspeed"} else self._draws
        self._sampler = TracedSampler(vars(loader)[name], items, draws)

    def _can_skip(self) -> bool:
        return not self._own_draws_in_workers()

    def _fresh(self, place: dict[str, Any] | None = None) -> tuple[Iterator[Any], Any]:
        trace = self._sampler.begin()
        return self._iterator(place), trace

    def _iterator(self, place: dict[str, Any] | None) -> Iterator[Any]:
        first = place is not None and place["begun"]["first"]
        changed = {} if place is None else new_workers(self.loader, first)
        with tracing(self.loader, self._attribute, self._sampler, **changed):
            return iter(self.loader)

    def _skipping(self, place: dict[str, Any], afresh: bool) -> Pass | None:
        self._own.set(place["begun"]["own"], afresh=afresh)
        trace = self._sampler.begin(place["consumed"] * self._items)
        batches = self._iterator(place)
        # As before: torch draws a seed for workers, and then the sampler its order.
        trace.advance()
        if not workers_of(self.loader):
            # Skipped samples were not read, and draws of the data set were left out.
            self._own.set(place["now"])
        return Pass(place["begun"], batches, trace) if is_right(trace, place["trace"]) else None
