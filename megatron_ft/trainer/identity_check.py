"""Compares a state with the one that a snapshot holds.

Before it is filled, names, dtypes and shapes must fit; afterwards the layout that is planned anew,
as a load may have made other tensors, and tensors may share memory here that had memory of their
own when they were saved.  For thousands of plain tensors ``PlainLayout`` answers both in calls that
loop in C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import astuple

from megatron_ft.core.errors import LayoutMismatchError, StateMismatchError
from megatron_ft.core.shard import LayoutEntry, ShardLayout, layout_differences
from megatron_ft.trainer.addresses import DENSE, has_memory, reach_bytes
from megatron_ft.trainer.binding import live_part, stored_view
from megatron_ft.trainer.plan import dtype_name, known_dtype
from megatron_ft.trainer.state import AdoptsTensors, TrainingState
from megatron_ft.trainer.tensor_table import ADDRESSES, DTYPES, SHAPES, TensorTable

Live = Mapping[str, torch.Tensor]

_IS_CPU, _LAYOUT = attrgetter("is_cpu"), attrgetter("layout")


class PlainLayout(NamedTuple):
    """A layout of whole tensors each of which has bytes of its own, by columns."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    offsets: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, layout: ShardLayout) -> PlainLayout | None:
        """The columns of a layout; None if it is of another kind."""
        if not layout.entries:
            return cls([], [], [], [], [])
        columns = map(list, zip(*map(astuple, layout.entries), strict=True))
        names, kinds, shapes, offsets, lengths, starts, stops, _, aliases, parts, _ = columns
        if any(aliases) or any(starts) or {*parts} != {1}:
            return None
        found = {name: known_dtype(name) for name in {*kinds} if not name.startswith("q")}
        known = {name: dtype for name, dtype in found.items() if dtype is not None}
        if known.keys() != {*kinds}:
            return None
        counts, dtypes = list(map(prod, shapes)), list(map(known.__getitem__, kinds))
        sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
        whole = stops == counts and lengths == sizes
        return cls(names, shapes, dtypes, offsets, lengths) if whole else None

    def table(self, live: Live) -> TensorTable | None:
        """Its tensors with their addresses first, if ``live`` are these and a copy of bytes fills
        them; None if something differs, or only a plan can find out.
        """
        if live.keys() != {*self.names}:
            return None
        tensors = list(map(live.__getitem__, self.names))
        if not _are_plain(tensors):
            return None
        made = TensorTable.of(self.names, tensors, (ADDRESSES, SHAPES, DTYPES))
        addresses, shapes, dtypes = made.facts
        if dtypes != self.dtypes or shapes != self.shapes:
            return None
        if 0 in addresses and not all(map(has_memory, tensors)):
            return None
        return made if _lie_apart(addresses, self.lengths) else None


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


def without_replaced(layout: ShardLayout, live: Live, state: TrainingState) -> Live:
    """The live tensors but those of another form that a load replaces, as an optimizer's state."""
    if not isinstance(state, AdoptsTensors):
        return live
    entries = layout.by_name()
    other = {
        name
        for name, tensor in live.items()
        if (entry := entries.get(name)) is not None
        and (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape)
        and state.replaces(name)
    }
    return {name: tensor for name, tensor in live.items() if name not in other} if other else live


def require_fit(
    layout: ShardLayout, live: Mapping[str, torch.Tensor], state: TrainingState
) -> None:
    """Refuse before any byte is written what can be known to differ by then.

    LayoutMismatchError that names the tensors; StateMismatchError if no other parallel layout can
    be the reason.
    """
    wrong, elsewhere = [], False
    for entry in layout.entries:
        tensor, known = live.get(entry.name), entry.logical is not None
        if tensor is None:
            if not isinstance(state, AdoptsTensors):
                wrong.append(f"{entry.name} is only in the snapshot")
                elsewhere |= known
        elif (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
            here = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            wrong.append(f"{entry.name} is {here}, in the snapshot {entry.describe()}")
            elsewhere |= known and tuple(tensor.shape) != entry.shape
        elif not has_memory(tensor):
            wrong.append(f"{entry.name} has no memory: its storage was resized to nothing")
    if wrong:
        error = LayoutMismatchError if elsewhere else StateMismatchError
        raise error(
            f"{len(wrong)} tensors do not fit the snapshot: {'; '.join(wrong[:8])}. "
            "Build the same model and optimizer as in the run that saved it. Layers that it had "
            "added or replaced by then must be so before `load`"
        )


def require_same_layout(stored: ShardLayout, live: ShardLayout) -> None:
    """LayoutMismatchError naming what differs, if anything does.

    StateMismatchError if no other parallel layout can be the reason: no tensor that differs has a
    place in the unsharded model, or all differ in their dtypes alone.
    """
    if stored == live:
        return
    differences = "; ".join(layout_differences(stored, live))
    if differences and _lie_elsewhere(stored, live):
        raise LayoutMismatchError(
            f"the state differs from the restored snapshot: {differences}. Build the "
            "same model, optimizer and parallel layout as in the run that saved it"
        )
    if differences:
        raise StateMismatchError(
            f"the state differs from the restored snapshot: {differences}. Build the same model "
            "and optimizer as in the run that saved it, and let load_state_dict keep dtypes and "
            "shapes"
        )


def _lie_elsewhere(stored: ShardLayout, live: ShardLayout) -> bool:
    """True if tensors differ that another parallel layout gives other shapes, places or names."""
    ours, theirs = live.by_name(), stored.by_name()
    alone = [(ours.get(name) or theirs[name]) for name in ours.keys() ^ theirs.keys()]
    pairs = [(theirs[name], ours[name]) for name in ours.keys() & theirs.keys()]
    moved = [a for a, b in pairs if a.logical and b.logical and a.logical != b.logical]
    resized = [a for a, b in pairs if a.shape != b.shape or a.parts != b.parts]
    return any(entry.logical is not None for entry in (*alone, *moved, *resized))


class Filled(NamedTuple):
    """A tensor that was given the bytes of an entry."""

    entry: LayoutEntry
    tensor: torch.Tensor

    def holds(self, region: torch.Tensor) -> bool:
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
