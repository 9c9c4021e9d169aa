"""Layouts and tensors as columns: what is asked of thousands of tensors, in calls that loop in C.

A plan takes microseconds for each tensor, which delays a restart; whether a layout is what would
be planned can be told in a tenth of that, for most states.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ft.capture.fill import Spans
from megatron_ft.capture.plan import Planned, dtype_name
from megatron_ft.shard import ALIGNMENT, LogicalPlace, ShardLayout

_SHAPE, _DTYPE, _LAYOUT = attrgetter("shape"), attrgetter("dtype"), attrgetter("layout")
_IS_CPU, _IS_META = attrgetter("is_cpu"), attrgetter("is_meta")
_IS_QUANTIZED, _NBYTES = attrgetter("is_quantized"), attrgetter("nbytes")
_DENSE = {torch.Tensor, torch.nn.Parameter}
"""Of these torch.strided says that they have plain memory; their subclasses may do otherwise."""


class Columns(NamedTuple):
    """The fields of all entries of a layout, one tuple a field, in the order of LayoutEntry."""

    name: tuple[str, ...]
    dtype: tuple[str, ...]
    shape: tuple[tuple[int, ...], ...]
    offset: tuple[int, ...]
    nbytes: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    boundary: tuple[bool, ...]
    alias_of: tuple[str, ...]
    parts: tuple[int, ...]
    logical: tuple[LogicalPlace | None, ...]

    @classmethod
    def of(cls, layout: ShardLayout) -> Columns:
        """Those of one layout."""
        if not layout.entries:
            return cls(*[()] * len(cls._fields))
        return cls._make(zip(*map(msgspec.structs.astuple, layout.entries), strict=True))

    @property
    def whole(self) -> bool:
        """Whether every tensor has bytes of its own, all of which are stored here."""
        return not any(self.alias_of) and set(self.parts) <= {1}

    def tensors_of(self, live: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """The live tensors in this order; None unless names, dtypes and shapes are these."""
        if live.keys() != set(self.name):
            return None
        tensors = [live[name] for name in self.name]
        same = list(map(_SHAPE, tensors)) == list(self.shape)
        names = map(dtype_name, map(_DTYPE, tensors))
        return tensors if same and tuple(names) == self.dtype else None


def plain_spans(layout: ShardLayout, live: Mapping[str, torch.Tensor]) -> Spans | None:
    """Where the bytes of every tensor go; None unless copies of bytes are all that it takes.

    They are where all tensors exist, each whole, with its values in order in host memory.
    """
    columns = Columns.of(layout)
    tensors = columns.tensors_of(live) if columns.whole else None
    if tensors is None or not _are_plain(tensors):
        return None
    return Spans(_addresses(tensors), list(columns.offset), list(columns.nbytes))


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    every, plain = torch.Tensor, _are_dense(tensors) and all(map(_IS_CPU, tensors))
    lazy_bits = any(map(every.is_conj, tensors)) or any(map(every.is_neg, tensors))
    return plain and all(map(every.is_contiguous, tensors)) and not lazy_bits


def _are_dense(tensors: list[torch.Tensor]) -> bool:
    """Whether a plan refuses none of them for its kind."""
    kinds = {*map(type, tensors)} <= _DENSE and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return kinds and not any(map(_IS_META, tensors)) and not any(map(_IS_QUANTIZED, tensors))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def is_plan_of(layout: ShardLayout, planned: Planned) -> bool:
    """Whether ``planned.layout()`` would be interchangeable with ``layout``.

    False also where only planning can tell: where tensors are split, or share memory.
    """
    columns = Columns.of(layout)
    tensors = columns.tensors_of(planned.live) if columns.whole and not planned.splits else None
    if tensors is None or not _are_dense(tensors):
        return False
    numbers, sizes = map(torch.Tensor.numel, tensors), tuple(map(_NBYTES, tensors))
    return (
        (set(columns.start) <= {0}, columns.stop, columns.nbytes) == (True, tuple(numbers), sizes)
        and list(columns.name) == sorted(columns.name)
        and _are_packed(columns, layout.tensor_bytes)
        and columns.boundary == tuple(name in planned.boundary for name in columns.name)
        and _lie_apart(np.array(_addresses(tensors), np.int64), np.array(sizes, np.int64))
        and _are_at(columns, planned.places)
    )


def _are_packed(columns: Columns, tensor_bytes: int) -> bool:
    """One behind the other, at the next aligned offset, as plan_layout puts them."""
    sizes = np.array(columns.nbytes, np.int64)
    ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
    return [*columns.offset, tensor_bytes] == [0, *ends]


def _lie_apart(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    return bool((ends[:-1] <= starts[order][1:]).all())


def _are_at(columns: Columns, places: Mapping[str, LogicalPlace]) -> bool:
    """Whether no tensor has another place in the unsharded model, where both sides know it."""
    live = map(places.get, columns.name)
    return all(
        stored == here or stored is None or here is None
        for stored, here in zip(columns.logical, live, strict=True)
    )
