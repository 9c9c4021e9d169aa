"""Compares a state with the one that a snapshot holds: before it is filled, and afterwards.

Before, names, dtypes and shapes must fit.  Afterwards the state is compared with the stored layout
once more, as a load may have made other tensors, and tensors may share memory here that had memory
of their own when they were saved.

Planning a layout takes microseconds for each tensor, which delays a restart.  For states of plain
tensors ``PlainLayout`` answers in a tenth of that, by calls that loop in C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter, lt
from typing import NamedTuple

import numpy as np
import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import (
    ALIGNMENT,
    LayoutEntry,
    LogicalPlace,
    ShardLayout,
    layout_differences,
)
from megatron_ft.trainer.addresses import DENSE, has_memory, reach_bytes
from megatron_ft.trainer.binding import live_part, stored_view
from megatron_ft.trainer.plan import Planned, dtype_name, known_dtype
from megatron_ft.trainer.state import AdoptsTensors, TrainingState

_IS_CPU, _LAYOUT, _DTYPE = attrgetter("is_cpu"), attrgetter("layout"), attrgetter("dtype")


class PlainLayout(NamedTuple):
    """A layout of whole tensors each of which has bytes of its own, by columns."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    logical: list[LogicalPlace | None]
    offsets: list[int]
    lengths: list[int]
    boundary: frozenset[str]

    @classmethod
    def of(cls, layout: ShardLayout) -> PlainLayout | None:
        """The columns of a layout; None if it is of another kind, or planned another way."""
        entries = layout.entries
        if any(entry.alias_of or entry.start or entry.parts != 1 for entry in entries):
            return None
        known = {name: known_dtype(name) for name in {entry.dtype for entry in entries}}
        dtypes = {n: d for n, d in known.items() if d is not None and not n.startswith("q")}
        if dtypes.keys() != known.keys():
            return None
        sizes = [prod(entry.shape) * dtypes[entry.dtype].itemsize for entry in entries]
        counts = [prod(entry.shape) for entry in entries]
        plain = cls(
            [entry.name for entry in entries],
            [entry.shape for entry in entries],
            [dtypes[entry.dtype] for entry in entries],
            [entry.logical for entry in entries],
            [entry.offset for entry in entries],
            [entry.nbytes for entry in entries],
            frozenset(entry.name for entry in entries if entry.boundary),
        )
        whole = plain.lengths == sizes and [entry.stop for entry in entries] == counts
        return plain if whole and plain._is_packed(layout.tensor_bytes) else None

    def _is_packed(self, tensor_bytes: int) -> bool:
        """True if tensors are sorted by name, one behind the other, as plan_layout puts them."""
        sizes = np.array(self.lengths, np.int64)
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
        return [*self.offsets, tensor_bytes] == [0, *ends] and all(
            map(lt, self.names, self.names[1:])
        )

    def addresses(self, live: Mapping[str, torch.Tensor]) -> list[int] | None:
        """The addresses of its tensors, if ``live`` are these and a copy of bytes fills them.

        None if something differs, or only planning can tell.
        """
        if len(live) != len(self.names):
            return None
        try:
            tensors = list(map(live.__getitem__, self.names))
        except KeyError:
            return None
        if not _are_plain(tensors) or list(map(_DTYPE, tensors)) != self.dtypes:
            return None
        shapes: list[tuple[int, ...]] = list(map(torch.Tensor.size, tensors))
        found = list(map(torch.Tensor.data_ptr, tensors))
        if shapes != self.shapes or (0 in found and not all(map(has_memory, tensors))):
            return None
        return found if _lie_apart(found, self.lengths) else None

    def agrees(self, planned: Planned) -> bool:
        """True if ``planned.layout()`` would be interchangeable with the stored one."""
        places = map(planned.places.get, self.names)
        return (
            {*planned.boundary} == self.boundary
            and not planned.splits
            and self.addresses(planned.live) is not None
            and all(
                there == here or there is None or here is None
                for there, here in zip(self.logical, places, strict=True)
            )
        )


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    """True if each is dense host memory, in order, whose bytes are its values."""
    every = torch.Tensor
    return (
        {*map(type, tensors)} <= DENSE
        and all(map(_IS_CPU, tensors))
        and {*map(_LAYOUT, tensors)} <= {torch.strided}
        and all(map(every.is_contiguous, tensors))
        and not any(map(every.is_neg, tensors))
        and not any(map(every.is_conj, tensors))
    )


def _lie_apart(addresses: list[int], lengths: list[int]) -> bool:
    starts, sizes = np.array(addresses, np.int64), np.array(lengths, np.int64)
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    return bool((ends[:-1] <= starts[order][1:]).all())


def require_fit(
    layout: ShardLayout, live: Mapping[str, torch.Tensor], state: TrainingState
) -> None:
    """Refuse before any byte is written what can be known to differ by then.

    Raises LayoutMismatchError that names the tensors.
    """
    wrong = []
    for entry in layout.entries:
        tensor = live.get(entry.name)
        if tensor is None:
            if not isinstance(state, AdoptsTensors):
                wrong.append(f"{entry.name} is only in the snapshot")
        elif (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
            here = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            wrong.append(f"{entry.name} is {here}, in the snapshot {entry.describe()}")
        elif not has_memory(tensor):
            wrong.append(f"{entry.name} has no memory: its storage was resized to nothing")
    if wrong:
        raise LayoutMismatchError(
            f"{len(wrong)} tensors do not fit the snapshot: {'; '.join(wrong[:8])}. "
            "Build the same model and optimizer as in the run that saved it"
        )


def require_same_layout(stored: ShardLayout, live: ShardLayout) -> None:
    """LayoutMismatchError naming what differs, if anything does."""
    if stored == live:
        return
    differences = layout_differences(stored, live)
    if differences:
        raise LayoutMismatchError(
            f"the state differs from the restored snapshot: {'; '.join(differences)}. Build the "
            "same model, optimizer and parallel layout as in the run that saved it"
        )


class Filled(NamedTuple):
    """A tensor that was given the bytes of an entry."""

    entry: LayoutEntry
    tensor: torch.Tensor

    def holds(self, region: torch.Tensor) -> bool:
        """True if the tensor still has the bytes of its entry."""
        now = live_part(self.tensor.detach().resolve_conj().resolve_neg(), self.entry)
        return torch.equal(_bytes(now.cpu()), _bytes(stored_view(region, self.entry)))


def require_all_held(filled: Sequence[Filled], region: torch.Tensor) -> None:
    """LayoutMismatchError if filling one tensor has changed another.

    A plan makes one entry of what lies within a contiguous tensor; others that overlap, such as
    transposed weights that are tied, have bytes of their own each.  These are equal if the
    tensors shared memory when they were saved as well.
    """
    places = [(one.tensor.data_ptr(), reach_bytes(one.tensor)) for one in filled]
    wrong = [filled[n].entry.name for n in sharing_storage(places) if not filled[n].holds(region)]
    if wrong:
        raise LayoutMismatchError(
            f"{len(wrong)} tensors share memory with others here and have other values than those "
            f"in the snapshot: {', '.join(sorted(wrong)[:8])}. Give each tensor memory of its own, "
            "as in the run that saved it"
        )


def sharing_storage(places: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the (address, length) that overlap another."""
    order = sorted((n for n, (_, length) in enumerate(places) if length), key=places.__getitem__)
    linked: list[list[int]] = []
    end = -1
    for number in order:
        start, length = places[number]
        if start >= end:
            linked.append([])
        linked[-1].append(number)
        end = max(end, start + length)
    return sorted(number for group in linked if len(group) > 1 for number in group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
