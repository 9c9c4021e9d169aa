"""A layout bound to memory: on one side the slots of an arena, on the other the live tensors.

At each capture the names of the layout are bound to the tensors that the state has now, and to
where these lie.  When their bytes have been copied, the same table says whether they still lie
there: a tensor that was replaced, resized or moved meanwhile is never captured stale.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from megatron_ft.core.shard import LayoutEntry, ShardLayout
from megatron_ft.trainer.addresses import has_memory
from megatron_ft.trainer.copier import Bytes, CopyItem, CopyList
from megatron_ft.trainer.plan import dtype_from_name, known_dtype

_NEVER_COPIED = {
    known_dtype(f"{sign}{bits}") for sign in ("int", "uint") for bits in range(1, 8)
} - {None}
"""Dtypes that torch has, a byte for each element, and that its copy_ refuses."""


def region_tensor(region: Bytes) -> torch.Tensor:
    """The bytes of a data region as a tensor that keeps the mapping alive; may be read-only."""
    with warnings.catch_warnings():
        # torch warns of writes to read-only arrays; readers of a region do not write.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(region)


def stored_view(region: torch.Tensor, entry: LayoutEntry) -> torch.Tensor:
    """The stored bytes of one entry, typed; flat if only a part of the tensor is stored.

    Of a dtype that torch cannot copy they are bytes, here and in ``live_part``.
    """
    raw = region[entry.offset : entry.offset + entry.nbytes]
    typed = _copyable(raw.view(dtype_from_name(entry.dtype)))
    return typed if entry.is_split else typed.view(entry.shape)


def live_part(tensor: torch.Tensor, entry: LayoutEntry) -> torch.Tensor:
    """The part of a live tensor that an entry stores, in the form of ``stored_view``; no copy.

    RuntimeError for a part of a tensor that is not contiguous: a plan makes none.
    """
    whole = _copyable(tensor)
    return whole.detach().view(-1)[entry.start : entry.stop] if entry.is_split else whole


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _NEVER_COPIED else tensor


Form = tuple[str, torch.dtype, tuple[int, ...]]

_FACTS = (
    torch.Tensor.data_ptr,
    attrgetter("shape"),
    torch.Tensor.stride,
    attrgetter("dtype"),
)


def layout_changed(mismatch: str) -> str:
    """The reason of a snapshot that is not taken, for logs and status, with the way out."""
    return (
        f"the layout has changed since it was planned ({mismatch}); training continues without "
        "newer snapshots until it is as before. Create all state before the first snapshot"
    )


class BoundState(NamedTuple):
    """The tensors of a layout in its order, and how each lay in memory when they were bound."""

    names: list[str]
    tensors: list[torch.Tensor]
    facts: list[list[Any]]

    @classmethod
    def of(cls, names: list[str], tensors: list[torch.Tensor]) -> BoundState:
        """The state of these tensors as of now."""
        return cls(names, tensors, [list(map(fact, tensors)) for fact in _FACTS])

    def same(self, other: BoundState) -> bool:
        """True if the other has these very tensors, with the same memory and form."""
        return all(map(is_, self.tensors, other.tensors)) and self.facts == other.facts

    def moved(self) -> str:
        """The name of a tensor that has other memory or another form by now, or nothing."""
        now = BoundState.of(self.names, self.tensors)
        if now.facts == self.facts:
            return ""
        before, after = zip(*self.facts, strict=True), zip(*now.facts, strict=True)
        pairs = zip(self.names, before, after, strict=True)
        return next(name for name, was, is_now in pairs if was != is_now)


class LayoutBinding:
    """A layout with its slots, computed once, and the tensors of the last snapshot.

    ``copied_bytes`` are the tensor bytes that one snapshot copies.
    """

    def __init__(self, layout: ShardLayout, regions: list[Bytes]) -> None:
        """``regions`` are the writable data regions, one per slot."""
        entries, by_name = layout.entries, layout.by_name()
        self.layout = layout
        self.layout_bytes = layout.to_bytes()
        self.layout_hash = layout.hash()
        self._names = [entry.name for entry in entries]
        self._forms = [(e.name, dtype_from_name(e.dtype), e.shape) for e in entries]
        self._owners = [entry for entry in entries if not entry.alias_of]
        at_once = {entry.name for entry in self._owners if entry.boundary}
        self._boundary_forms = [form for form in self._forms if form[0] in at_once]
        self._aliases = [
            (e.name, e.alias_of, e.offset - by_name[e.alias_of].offset)
            for e in entries
            if e.alias_of
        ]
        self.copied_bytes = sum(entry.nbytes for entry in self._owners)
        self._targets = [
            {e.name: stored_view(region, e) for e in self._owners}
            for region in map(region_tensor, regions)
        ]
        self._bound: BoundState | None = None
        self._items: dict[int, CopyList] = {}

    def mismatch(self, live: Mapping[str, torch.Tensor]) -> str:
        """The reason why the live tensors no longer fit the layout; empty if they fit so far.

        Compares the names, and all of those that are read at the boundary.  The others are
        compared when they are bound: to look at thousands would hold training for a millisecond.
        """
        same_names = self._in_order(live) is not None
        return self._difference(live, self._boundary_forms if same_names else self._forms)

    def at_boundary(self, live: Mapping[str, torch.Tensor], slot: int) -> list[CopyItem]:
        """The copies of what forward may change; ``mismatch`` must have been asked before."""
        targets = self._targets[slot]
        owners = [entry for entry in self._owners if entry.boundary]
        return [CopyItem(live_part(live[e.name], e), targets[e.name]) for e in owners]

    def bind(self, live: Mapping[str, torch.Tensor]) -> BoundState:
        """The tensors as they lie now; for the copy thread, before their bytes are read.

        ValueError if they do not fit: some may have been given other memory since the boundary.
        """
        tensors = self._in_order(live)
        difference = self._difference(live, self._forms) or self._parted(live)
        if difference or tensors is None:
            raise ValueError(layout_changed(difference))
        return BoundState.of(self._names, tensors)

    def later(self, live: Mapping[str, torch.Tensor], bound: BoundState, slot: int) -> CopyList:
        """The copies of all other tensors, made anew unless these are as they were last time."""
        if self._bound is None or not self._bound.same(bound):
            self._bound, self._items = bound, {}
        made = self._items  # forget() may come in between
        if slot not in made:
            targets = self._targets[slot]
            owners = [entry for entry in self._owners if not entry.boundary]
            pairs = [CopyItem(live_part(live[e.name], e), targets[e.name]) for e in owners]
            made[slot] = CopyList(pairs)
        return made[slot]

    def forget(self) -> None:
        """Let go of the tensors of last time, and of all views of their memory.

        A copy that still runs may keep some, until the next snapshot at most.
        """
        self._bound, self._items = None, {}

    def release(self) -> None:
        """Drop all views of the arena, so that it can be unmapped."""
        self.forget()
        self._targets.clear()

    def _in_order(self, live: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors in the order of the layout; None if they have other names."""
        if len(live) != len(self._names):
            return None
        try:
            return list(map(live.__getitem__, self._names))
        except KeyError:
            return None

    def _difference(self, live: Mapping[str, torch.Tensor], forms: Sequence[Form]) -> str:
        """Names a tensor that has gone, is new, or has no memory or not its form of ``forms``."""
        for name, dtype, shape in forms:
            tensor = live.get(name)
            if tensor is None:
                return f"{name} has gone"
            if tensor.dtype != dtype or tensor.shape != shape:
                return f"{name} is now {tensor.dtype} {list(tensor.shape)}"
            if not has_memory(tensor):
                return f"{name} has no memory any more"
        if len(live) != len(self._names):
            return f"{min(live.keys() - {*self._names})} is new"
        return ""

    def _parted(self, live: Mapping[str, torch.Tensor]) -> str:
        """Names an alias that has memory of its own by now."""
        for name, owner, distance in self._aliases:
            if live[name].data_ptr() != live[owner].data_ptr() + distance:
                return f"{name} no longer shares memory with {owner}"
        return ""
