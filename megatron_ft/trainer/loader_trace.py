"""A number to compare for all that a pass over the data has given, and samplers that skip.

A replayed pass is right if what it skips has the trace of what training used.  Traces are of
the sampler's items where a loader has a sampler, else of the batches.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from megatron_ft.trainer.state import drawn

SAMPLED = 256
"""Elements of a tensor that a trace looks at, at most."""


class SharedDraws:
    """Reads an iterator, and finds out if its order depends on other draws of the process.

    This is so if reading draws from the process's generators behind the first item, and if others
    have drawn from them in between.
    """

    def __init__(self) -> None:
        self._left: Any = None
        self._draws = self._others = False

    @property
    def mixed(self) -> bool:
        """True if no replay can give the same items."""
        return self._draws and self._others

    def begin(self) -> None:
        """A pass begins: its first item may draw the order."""
        self._left = None

    def next(self, items: Iterator[Any], default: Any) -> Any:
        """The next item, or ``default`` at the end."""
        if self.mixed:
            return next(items, default)
        before, left = drawn(), self._left
        item = next(items, default)
        self._left = drawn()
        if left is not None:
            self._draws |= self._left != before
            self._others |= before != left
        return item


class BatchTrace:
    """The trace of batches."""

    def __init__(self, value: int | None = 0) -> None:
        self.value = value

    def took(self, batch: Any) -> None:
        """Training has got this batch."""
        self.value = _traced(batch, self.value or 0)


class ItemTrace:
    """A pass over a sampler, which drops its first items, and the trace of items in use.

    A batch is made of ``each`` items.
    """

    def __init__(self, sampler: Any, skip: int, each: int, draws: SharedDraws | None) -> None:
        self._sampler, self._skip, self._each, self._draws = sampler, skip, each, draws
        self._rest: Iterator[Any] | None = None
        self._ahead: deque[int] = deque()
        self._newest = 0
        self.value: int | None = 0

    def items(self) -> Iterator[Any]:
        """The items that are not dropped."""
        self.advance()
        assert self._rest is not None
        end = object()
        while (item := self._next(self._rest, end)) is not end:
            self._newest = _traced(item, self._newest)
            self._ahead.append(self._newest)
            yield item

    def _next(self, items: Iterator[Any], end: Any) -> Any:
        return next(items, end) if self._draws is None else self._draws.next(items, end)

    def advance(self) -> None:
        """Begin the pass, unless workers have asked for its first items already."""
        if self._rest is None:
            if self._draws is not None:
                self._draws.begin()
            self._rest = iter(self._sampler)
            for item in islice(self._rest, self._skip):
                self._newest = _traced(item, self._newest)
            self.value = self._newest

    def took(self, _batch: Any) -> None:
        """Training has got the next batch."""
        if not self._ahead:
            self.value = None  # the loader does not read this sampler
        for _ in range(min(self._each, len(self._ahead))):
            self.value = self._ahead.popleft()


class TracedSampler:
    """Stands for a sampler while a pass begins."""

    def __init__(self, sampler: Any, each: int, draws: SharedDraws | None) -> None:
        self._sampler, self._each, self._draws = sampler, each, draws
        self._waiting: ItemTrace | None = None

    @property
    def traced(self) -> Any:
        """The loader's own sampler."""
        return self._sampler

    def begin(self, skip: int = 0) -> ItemTrace:
        """Have the next pass drop its first items; its trace."""
        self._waiting = ItemTrace(self._sampler, skip, self._each, self._draws)
        return self._waiting

    def __iter__(self) -> Iterator[Any]:
        # The pass begins as it is read: torch makes an iterator more than it reads.
        trace, self._waiting = self._waiting or self.begin(), None
        yield from trace.items()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # Accelerate's loader sets the epoch of its sampler as a pass begins.
        return getattr(vars(self)["_sampler"], name)


@contextmanager
def tracing(loader: Any, name: str, sampler: TracedSampler, **changed: Any) -> Iterator[None]:
    """Put ``sampler`` in the place of a loader's attribute ``name``, for a pass that begins inside
    the block; so for other attributes."""
    # Not setattr: DataLoader guards against changes while an iterator is under way.
    attributes, changed = vars(loader), {name: sampler, **changed}
    before = {key: attributes[key] for key in changed}
    attributes.update(changed)
    try:
        yield
    finally:
        attributes.update(before)


def workers_of(loader: Any) -> int:
    """The number of processes that read for a loader of torch or DeepSpeed."""
    number = getattr(loader, "num_workers", getattr(loader, "num_local_io_workers", 0))
    return number if isinstance(number, int) else 0


def new_workers(loader: Any, first_pass: bool) -> dict[str, Any]:
    """Have a loader with persistent workers make new ones; what ``tracing`` is to change for it."""
    if not getattr(loader, "persistent_workers", False):
        return {}
    vars(loader)["_iterator"] = None
    # In a later pass it reused workers, and drew no seed for them.
    return {} if first_pass else {"generator": torch.Generator()}


def sampler_name(loader: Any) -> str:
    """The attribute of torch's DataLoader that gives an item for each batch, '' if none does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def dropped(items: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator, without its first items."""
    next(islice(items, count, count), None)
    return items


def read(batches: Iterator[Any], count: int, trace: Any) -> None:
    """Read so many batches, for their trace alone."""
    for batch in islice(batches, count):
        if trace is not None:
            trace.took(batch)


def is_right(trace: Any, right: int | None) -> bool:
    """True if a pass that was replayed has this trace, or if nobody knows."""
    return trace is None or right is None or trace.value == right


def _traced(value: Any, before: int) -> int:
    """The trace of a value behind others; values of unknown classes count by their class."""
    kind = type(value)
    if kind is int or (kind is list and {*map(type, value)} == {int}):
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, torch.Tensor):
        return _traced_tensor(value, before)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        step = max(1, value.size // SAMPLED)
        before = zlib.crc32(f"{value.dtype}{value.shape}".encode(), before)
        return zlib.crc32(value.reshape(-1)[::step].tobytes(), before)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            before = _traced(inner, _traced(key, before))
        return before
    if isinstance(value, list | tuple):
        for inner in value[:SAMPLED]:
            before = _traced(inner, before)
        return zlib.crc32(str(len(value)).encode(), before)
    plain = isinstance(value, str | bytes | int | float | np.generic | None)
    return zlib.crc32((repr(value) if plain else kind.__name__).encode(), before)


def _traced_tensor(value: torch.Tensor, before: int) -> int:
    """By shape, and some elements of it; those on an accelerator would have to be waited for."""
    before = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), before)
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_nested:
        return before
    step = max(1, value.numel() // SAMPLED)
    some = value.detach().reshape(-1)[::step].contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes(), before)
