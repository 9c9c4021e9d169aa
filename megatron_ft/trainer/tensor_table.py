"""One answer to "are these the tensors of last time?", for everything that asks it.

``Members`` compares the dicts that hold tensors, ``TensorTable`` tensors and facts of them.  Both
loop in C: there are thousands, and training waits meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

_DICTS = {dict, OrderedDict, defaultdict}


def are_all(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """True if both hold these very objects, in this order."""
    return len(left) == len(right) and all(map(is_, left, right))


class Members(NamedTuple):
    """The content of dicts in order: their keys and sizes, and their values."""

    keys: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, holders: Collection[Any], more: Iterable[Any] = ()) -> Members | None:
        """The content as of now, with ``more`` values; None if one holder is another container."""
        if not {*map(type, holders)} <= _DICTS:
            return None
        full = list(filter(None, holders))  # most dicts of modules are empty
        keys = [*chain.from_iterable(full), *map(len, holders)]
        return cls(keys, [*chain.from_iterable(map(dict.values, full)), *more])

    def same(self, other: Members | None) -> bool:
        return other is not None and self.keys == other.keys and are_all(self.values, other.values)


Column = Callable[[Sequence[torch.Tensor]], list[Any]]
"""Reads one fact of each tensor."""


def _column(read: Callable[[Any], Any]) -> Column:
    return lambda tensors: list(map(read, tensors))


_VERSION = attrgetter("_version")


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of writes to each, as torch counts; -1 of one made in inference mode."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


ADDRESSES = _column(torch.Tensor.data_ptr)
DTYPES, SHAPES = _column(attrgetter("dtype")), _column(torch.Tensor.size)
FORMS = (ADDRESSES, SHAPES, _column(torch.Tensor.stride), DTYPES)


class TensorTable(NamedTuple):
    """Named tensors, and facts of them, by columns, as of the moment when it was made."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    columns: Sequence[Column]
    facts: list[list[Any]]

    @classmethod
    def of(
        cls, names: Sequence[str], tensors: Sequence[torch.Tensor], columns: Sequence[Column]
    ) -> TensorTable:
        return cls(names, tensors, columns, [read(tensors) for read in columns])

    def same(self, other: TensorTable) -> bool:
        return are_all(self.tensors, other.tensors) and self.facts == other.facts

    def still(self, now: Mapping[str, torch.Tensor]) -> bool:
        """True if these are the only tensors of ``now``, under their names, with the same facts."""
        if now.keys() != {*self.names}:
            return False
        tensors = list(map(now.__getitem__, self.names))
        return self.same(TensorTable.of(self.names, tensors, self.columns))

    def changed(self) -> list[str]:
        now = [read(self.tensors) for read in self.columns]
        if now == self.facts:
            return []
        rows = zip(self.names, zip(*self.facts, strict=True), zip(*now, strict=True), strict=True)
        return [name for name, was, is_now in rows if was != is_now]
