"""Checksums of what a pass has given, and samplers that drop what a pass had given before.

A pass that was repeated is right if what it skips has the trace of what training used.  Traces are
of the sampler's items where a loader has a sampler, else of the batches.
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
"""Most elements of a tensor that a trace reads."""

END = object()
"""Stands for the item behind the last one."""


def first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The first ``count``; islice would call iter(), at which DeepSpeed's loader restarts."""
    for _ in range(count):
        if (batch := next(batches, END)) is END:
            return
        yield batch


class SharedDraws:
    """Reads an iterator, and finds out if its order depends on other draws of the process.

    ``draws``: reading draws from the process's generators behind the first item, which may draw
    the order.  ``others``: so do others in between.  With both no replay can give the same items.
    """

    def __init__(self) -> None:
        self._left: Any = None
        self.draws = self.others = False

    def new_pass(self) -> None:
        self._left = None

    def next(self, items: Iterator[Any]) -> Any:
        if self.draws and self.others:
            return next(items, END)
        before, left = drawn(), self._left
        item = next(items, END)
        self._left = drawn()
        if left is not None:
            self.draws |= self._left != before
            self.others |= before != left
        return item


class BatchTrace:
    """The trace of the batches that training has got, with those of ``value`` before them."""

    def __init__(self, value: int | None = 0) -> None:
        self.value = value

    def add(self, batch: Any) -> None:
        self.value = _traced(batch, self.value or 0)


class TracedSampler:
    """Stands for a sampler in one pass, of which it drops the first items; has the trace of those
    in use.

    A batch is made of ``each`` items.
    """

    def __init__(self, sampler: Any, skip: int, each: int, draws: SharedDraws | None) -> None:
        self.traced, self._skip, self._each, self._draws = sampler, skip, each, draws
        self._rest: Iterator[Any] | None = None
        self._ahead: deque[int] = deque()
        self._newest, self._is_read = 0, False
        self.value: int | None = 0

    def __iter__(self) -> Iterator[Any]:
        # The pass begins as it is read: torch makes an iterator more than it reads.
        if self._is_read:
            yield from self.traced
            return
        self._is_read, rest = True, self.start()
        while (item := self._draws.next(rest) if self._draws else next(rest, END)) is not END:
            self._newest = _traced(item, self._newest)
            self._ahead.append(self._newest)
            yield item

    def start(self) -> Iterator[Any]:
        """The items that are not dropped; workers may have asked for the first of them."""
        if self._rest is None:
            self._rest = iter(self.traced)
            for item in islice(self._rest, self._skip):
                self._newest = _traced(item, self._newest)
            self.value = self._newest
        return self._rest

    def add(self, _batch: Any) -> None:
        if not self._ahead:
            self.value = None  # the loader does not read this sampler
        for _ in range(min(self._each, len(self._ahead))):
            self.value = self._ahead.popleft()

    def __len__(self) -> int:
        return len(self.traced)

    def __getattr__(self, name: str) -> Any:
        # Accelerate's loader sets the epoch of its sampler as a pass begins.
        return getattr(vars(self)["traced"], name)


@contextmanager
def tracing(loader: Any, name: str, trace: Any, place: Mapping[str, Any] | None) -> Iterator[None]:
    """Put ``trace`` in the place of a loader's sampler, the attribute ``name``, for a pass that
    begins inside the block; make new workers if the pass is that of ``place``.
    """
    changed = {name: trace} if name else {}
    stays = getattr(loader, "persistent_workers", False)
    if stays and place is not None:
        vars(loader)["_iterator"] = None
        if not place["begun"]["first"]:
            # In a later pass it reused workers, and drew no seed for them.
            changed["generator"] = torch.Generator()
    elif stays and name and (kept := loader._iterator) is not None:
        kept._index_sampler = trace
    # Not setattr: DataLoader guards against changes while an iterator is under way.
    attributes = vars(loader) if changed else {}
    before = {key: attributes[key] for key in changed}
    attributes.update(changed)
    try:
        yield
    finally:
        attributes.update(before)


def workers_of(loader: Any) -> int:
    number = getattr(loader, "num_workers", getattr(loader, "num_local_io_workers", 0))
    return number if isinstance(number, int) else 0


def sampler_name(loader: Any) -> str:
    """The attribute of torch's DataLoader that gives an item for each batch, '' if none does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


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
