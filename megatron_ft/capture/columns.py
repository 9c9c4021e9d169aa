"""Layouts and tensors as columns: what is asked of thousands of tensors, in calls that loop in C.

A plan takes microseconds for each tensor, which delays a restart; whether a layout is what would
be planned can be told in a tenth of that, for most states.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_, lt
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

    def are_whole(self) -> bool:
        """Whether every tensor has bytes of its own, all of which are stored here."""
        return not any(self.alias_of) and set(self.parts) <= {1} and set(self.start) <= {0}

    def are_packed(self, tensor_bytes: int) -> bool:
        """Sorted by name, one behind the other, as plan_layout puts whole tensors."""
        sizes = np.array(self.nbytes, np.int64)
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
        at = [*self.offset, tensor_bytes] == [0, *ends]
        return at and all(map(lt, self.name, self.name[1:]))


class WholeTensors(NamedTuple):
    """Live tensors that a plan would give the very bytes of a stored layout, in its order.

    What a plan takes from elsewhere is compared by ``agrees``.
    """

    columns: Columns
    tensors: list[torch.Tensor]
    facts: tuple[list[int], list[tuple[int, ...]], list[torch.dtype]]

    @classmethod
    def of(cls, layout: ShardLayout, live: Mapping[str, torch.Tensor]) -> WholeTensors | None:
        """None if something differs, or only planning can tell: tensors share memory, or are split.

        Shared memory is the same for CUDA tensors: addresses are unique over all devices.
        """
        columns = Columns.of(layout)
        same_names = live.keys() == set(columns.name)
        if not (same_names and columns.are_whole() and columns.are_packed(layout.tensor_bytes)):
            return None
        found = cls._asked(columns, [live[name] for name in columns.name])
        return found if found is not None and found._fit() else None

    @classmethod
    def _asked(cls, columns: Columns, tensors: list[torch.Tensor]) -> WholeTensors | None:
        """None if one of them has no address."""
        return cls(columns, tensors, _facts(tensors)) if _are_dense(tensors) else None

    def _fit(self) -> bool:
        addresses, shapes, dtypes = self.facts
        columns, sizes = self.columns, tuple(map(_NBYTES, self.tensors))
        elements = tuple(map(torch.Tensor.numel, self.tensors))
        same = (tuple(map(dtype_name, dtypes)), sizes, elements)
        return (
            shapes == list(columns.shape)
            and same == (columns.dtype, columns.nbytes, columns.stop)
            and _lie_apart(np.array(addresses, np.int64), np.array(sizes, np.int64))
        )

    def spans(self) -> Spans | None:
        """Where their bytes go, if copies of bytes are all that it takes."""
        if not _are_plain(self.tensors):
            return None
        return Spans(self.facts[0], list(self.columns.offset), list(self.columns.nbytes))

    def agrees(self, layout: ShardLayout, planned: Planned) -> bool:
        """Whether ``planned.layout()`` would be interchangeable with ``layout``, by now."""
        now = self if self._stayed(planned.live) else WholeTensors.of(layout, planned.live)
        boundary = tuple(name in planned.boundary for name in self.columns.name)
        return (
            now is not None
            and not planned.splits
            and boundary == self.columns.boundary
            and _are_at(self.columns, planned.places)
        )

    def _stayed(self, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether these very tensors are all there are, where they were and as they were."""
        same = len(live) == len(self.tensors)
        same = same and all(map(is_, map(live.get, self.columns.name), self.tensors))
        return same and _facts(self.tensors) == self.facts


def _facts(
    tensors: list[torch.Tensor],
) -> tuple[list[int], list[tuple[int, ...]], list[torch.dtype]]:
    place = torch.Tensor.data_ptr
    return list(map(place, tensors)), list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    every, here = torch.Tensor, all(map(_IS_CPU, tensors))
    lazy_bits = any(map(every.is_conj, tensors)) or any(map(every.is_neg, tensors))
    return here and all(map(every.is_contiguous, tensors)) and not lazy_bits


def _are_dense(tensors: list[torch.Tensor]) -> bool:
    """Whether a plan refuses none of them for its kind."""
    kinds = {*map(type, tensors)} <= _DENSE and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return kinds and not any(map(_IS_META, tensors)) and not any(map(_IS_QUANTIZED, tensors))


def _lie_apart(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    return bool((ends[:-1] <= starts[order][1:]).all())


def _are_at(columns: Columns, places: Mapping[str, LogicalPlace]) -> bool:
    """Whether no tensor has another place in the unsharded model, where both sides know it."""
    live = map(places.get, columns.name)
    return not places or all(
        stored == here or stored is None or here is None
        for stored, here in zip(columns.logical, live, strict=True)
    )
