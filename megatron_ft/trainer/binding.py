"""A layout bound to memory: on one side the slots of an arena, on the other the live tensors.

At each capture the names of the layout are bound to the tensors that the state has now.  What is
copied lazily is compared with itself at the boundary: a tensor that was written to, replaced,
resized or moved before its bytes had arrived is never captured.  One that was is copied early from
then on, before ``save`` returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_ft.core.shard import LayoutEntry, ShardLayout
from megatron_ft.trainer.addresses import has_memory
from megatron_ft.trainer.copier import Bytes, CopyItem, CopyList
from megatron_ft.trainer.plan import dtype_from_name, known_dtype
from megatron_ft.trainer.sample import Sampler
from megatron_ft.trainer.tensor_table import ADDRESSES, FORMS, TensorTable, versions

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

MOST_ROUNDS = 3
"""Times that tensors are found to change too early, before all of them are taken to do so: each
costs a snapshot."""


def changed_early(names: Sequence[str]) -> str:
    """The reason of a snapshot that is given up as tensors changed, for logs and status."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} changed outside of a fence; save() waits for the copy of what does from "
        "now on. Change captured tensors inside `with snapshots.fence():` to avoid the wait"
    )


def layout_changed(mismatch: str) -> str:
    """The reason of a snapshot that is not taken, for logs and status."""
    return (
        f"the layout has changed ({mismatch}); it is planned anew at the boundary of the next "
        "snapshot"
    )


class BoundaryFacts(NamedTuple):
    """Addresses of lazily copied tensors at a boundary, and the number of writes to each."""

    places: TensorTable
    writes: TensorTable

    def written(self) -> list[str]:
        return list(dict.fromkeys(self.writes.changed()))

    def changed(self) -> list[str]:
        return list(dict.fromkeys(self.places.changed() + self.writes.changed()))


def _gaps(owners: Iterable[LayoutEntry], stop: int) -> list[tuple[int, int]]:
    """Offset and length of each range before ``stop`` that belongs to no entry."""
    found, at = [], 0
    for entry in sorted(owners, key=lambda e: e.offset):
        if entry.offset > at:
            found.append((at, entry.offset - at))
        at = max(at, entry.offset + entry.nbytes)
    return [*found, (at, stop - at)] if stop > at else found


class LayoutBinding:
    """A layout with its slots, computed once, and the tensors of the last snapshot.

    ``copied_bytes`` are the tensor bytes that one snapshot copies; ``gaps`` are ranges between
    them, as offsets and lengths.
    """

    def __init__(
        self, layout: ShardLayout, regions: list[Bytes], *, thorough: bool = False
    ) -> None:
        """``regions`` are the writable data regions, one per slot.

        ``thorough``: compare all tensors at each boundary, as they were once found to differ later.
        """
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
        self._owner_of = {name: owner for name, owner, _ in self._aliases}
        self.copied_bytes = sum(entry.nbytes for entry in self._owners)
        self.gaps = _gaps(self._owners, layout.tensor_bytes)
        self._targets = [
            {e.name: stored_view(region, e) for e in self._owners}
            for region in map(region_tensor, regions)
        ]
        self._thorough, self._changed = thorough, ""
        self._bound: TensorTable | None = None
        self._items: dict[int, list[CopyList]] = {}
        self.sampler = Sampler(self.lazy_entries)
        self._rounds, self._early = 0, frozenset[str]()
        self._set_lazy()

    def mismatch(self, live: Mapping[str, torch.Tensor]) -> str:
        """The reason why the live tensors no longer fit the layout; empty if they fit so far.

        Compares the names, and all of those that are read at the boundary.  The others are
        compared when they are bound: a check of thousands would hold training for a millisecond.
        What was found then is the answer from there on.
        """
        if self._changed:
            return self._changed
        few = not self._thorough and self._in_order(live) is not None
        return self._difference(live, self._boundary_forms if few else self._forms)

    @property
    def seen_late(self) -> bool:
        """True if a tensor was found to differ when its bytes were about to be copied."""
        return self._thorough or bool(self._changed)

    def at_boundary(self, live: Mapping[str, torch.Tensor], slot: int) -> list[CopyItem]:
        """The copies of what forward may change; ``mismatch`` must have been asked before."""
        targets = self._targets[slot]
        owners = [entry for entry in self._owners if entry.boundary]
        return [CopyItem(live_part(live[e.name], e), targets[e.name]) for e in owners]

    def witness(
        self, live: Mapping[str, torch.Tensor], wrapped: Mapping[str, torch.Tensor]
    ) -> BoundaryFacts:
        """The lazily copied tensors at the boundary.

        ``wrapped`` are the program's own tensors (DTensors) that hold some of ``live``, by name: a
        write through these is counted there alone.
        """
        names, tensors = self._lazy, list(map(live.__getitem__, self._lazy))
        places = TensorTable.of(names, tensors, (ADDRESSES,))
        if wrapped:
            outer = [name for name in names if name in wrapped]
            names = [*names, *outer]
            tensors = [*tensors, *map(wrapped.__getitem__, outer)]
        return BoundaryFacts(places, TensorTable.of(names, tensors, (versions,)))

    def bind(self, live: Mapping[str, torch.Tensor]) -> TensorTable:
        """The tensors as they lie now; for the copy thread, before their bytes are read.

        ValueError if they do not fit: some may have been given other memory since the boundary.
        """
        tensors = self._in_order(live)
        difference = self._difference(live, self._forms) or self._parted(live)
        if difference or tensors is None:
            self._changed = difference
            raise ValueError(layout_changed(difference))
        return TensorTable.of(self._names, tensors, FORMS)

    def later(
        self, live: Mapping[str, torch.Tensor], bound: TensorTable, slot: int
    ) -> list[CopyList]:
        """The copies of all other tensors: those that are copied before ``save`` returns, the rest.

        Made anew unless the tensors are as they were last time.
        """
        if self._bound is None or not self._bound.same(bound):
            self._bound, self._items = bound, {}
        made, early = self._items, self._early  # forget() and hurry() may come in between
        if slot not in made:
            targets, parts = self._targets[slot], (CopyList(), CopyList())
            for e in self.lazy_entries:
                item = CopyItem(live_part(live[e.name], e), targets[e.name])
                parts[e.name not in early].append(item)
            made[slot] = [*parts]
        return made[slot]

    @property
    def lazy_entries(self) -> list[LayoutEntry]:
        """All but those that are secured at the boundary."""
        return [entry for entry in self._owners if not entry.boundary]

    @property
    def hurries(self) -> bool:
        """True if some tensors are copied before ``save`` returns."""
        return bool(self._early)

    @property
    def hurries_all(self) -> bool:
        """True if nothing is copied after ``save`` has returned."""
        return bool(self._early) and not self._lazy

    def lazy_of(self, names: Iterable[str]) -> list[str]:
        lazy = {*self._lazy}
        return [name for name in names if name in lazy]

    def hurry(self, names: Iterable[str] = ()) -> None:
        """Copy these tensors before ``save`` returns from now on; all of them by default."""
        chosen = {self._owner_of.get(name, name) for name in names}
        if chosen and chosen <= self._early:
            return
        self._rounds += 1
        if not chosen or self._rounds > MOST_ROUNDS:
            chosen = {entry.name for entry in self._owners}
        self._early, self._items = self._early | chosen, {}
        self._set_lazy()

    def hurry_like(self, before: LayoutBinding) -> None:
        """Copy early what another binding did, of the tensors that both have."""
        known = before._early & {entry.name for entry in self._owners}
        if before.hurries_all or known:
            self.hurry(() if before.hurries_all else known)

    def _set_lazy(self) -> None:
        early, owner = self._early, self._owner_of
        every = [entry.name for entry in self.layout.entries if not entry.boundary]
        self._lazy = [name for name in every if owner.get(name, name) not in early]

    def forget(self) -> None:
        """Let go of the tensors of last time, and of all views of their memory.

        A copy that still runs may keep some, until the next snapshot at most.
        """
        self._bound, self._items = None, {}
        self.sampler.forget()

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
