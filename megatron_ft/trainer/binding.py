"""A layout bound to memory: typed views of a slot, and the check that a state still fits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
    """What of a live tensor an entry stores, in the form of ``stored_view``; no copy.

    RuntimeError for a part of a tensor that is not contiguous: a plan makes none.
    """
    whole = _copyable(tensor)
    return whole.detach().view(-1)[entry.start : entry.stop] if entry.is_split else whole


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _NEVER_COPIED else tensor


Items = tuple[CopyList, CopyList]

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_FACTS = (torch.Tensor.data_ptr, _SHAPE, torch.Tensor.stride, _DTYPE)


class _Seen(NamedTuple):
    """Which tensors a state had, and how they lay in memory: taken by calls that loop in C."""

    names: list[str]
    tensors: list[torch.Tensor]
    facts: list[list[Any]]

    @classmethod
    def of(cls, live: Mapping[str, torch.Tensor]) -> _Seen:
        tensors = list(live.values())
        return cls(list(live), tensors, _facts(tensors))

    def same(self, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether these very tensors have these names, wherever they lie by now, or others that
        look at the very memory of these: adapters of frameworks make views of it each time.
        """
        if self.names != list(live):
            return False
        return all(map(is_, self.tensors, live.values())) or _alike(
            self.tensors, list(live.values())
        )

    def stayed(self) -> bool:
        """Whether all of them still lie where they lay, in the same form."""
        return self.facts == _facts(self.tensors)


def _alike(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    """Whether each pair shares storage, place in it, form and dtype; never one with a lazy sign."""
    try:
        return list(map(_DTYPE, now)) == list(map(_DTYPE, before)) and all(
            map(torch.Tensor.is_set_to, now, before)
        )
    except RuntimeError:
        # Of two devices, or of a kind that torch cannot compare so.
        return False


def _facts(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in _FACTS]


def layout_changed(mismatch: str) -> str:
    """The reason of a snapshot that is not taken, for logs and status, with the way out."""
    return (
        f"the layout has changed since it was planned ({mismatch}); training continues without "
        "newer snapshots until it is as before. Create all state before the first snapshot"
    )


class LayoutBinding:
    """What every snapshot needs of a layout, computed once.

    ``copied_bytes`` are the tensor bytes that one snapshot copies.
    """

    def __init__(self, layout: ShardLayout, regions: list[Bytes]) -> None:
        """``regions`` are the writable data regions, one per slot."""
        self.layout = layout
        self.layout_bytes = layout.to_bytes()
        self.layout_hash = layout.hash()
        self._owners = [entry for entry in layout.entries if not entry.alias_of]
        self._read_at_once = [entry.name for entry in self._owners if entry.boundary]
        self._expected = [
            (entry.name, dtype_from_name(entry.dtype), entry.shape) for entry in layout.entries
        ]
        by_name = layout.by_name()
        self._aliases = [
            (e.name, e.alias_of, e.offset - by_name[e.alias_of].offset)
            for e in layout.entries
            if e.alias_of
        ]
        self._seen: _Seen | None = None
        self._cached: dict[int, Items] = {}
        self.copied_bytes = sum(entry.nbytes for entry in self._owners)
        self._targets = [self._views(region_tensor(region)) for region in regions]

    def _views(self, region: torch.Tensor) -> list[torch.Tensor]:
        return [stored_view(region, entry) for entry in self._owners]

    def mismatch(self, live: Mapping[str, torch.Tensor]) -> str:
        """Why the live tensors no longer fit the layout; empty if they do.

        Compares names, dtypes and shapes, and that tensors have memory, aliases that of their
        owners.  The very tensors of last time, and new views of their memory, are left to
        ``settle``: to look at thousands one by one would hold training for milliseconds.  Only
        what is read before ``settle`` must have memory: torch would end the process.
        """
        known = self._seen is not None and self._seen.same(live)
        readable = known and all(has_memory(live[name]) for name in self._read_at_once)
        return "" if readable else self._look(live)

    def settle(self, live: Mapping[str, torch.Tensor]) -> str:
        """As ``mismatch``, of tensors that may have been given other memory or another form.

        For the copy thread, which has the time, before it asks for ``items``.
        """
        seen = self._seen  # forget() may come in between
        if seen is not None and seen.stayed():
            return ""
        return self._look(live)

    def _look(self, live: Mapping[str, torch.Tensor]) -> str:
        self._seen, self._cached = None, {}
        difference = self._difference(live)
        if not difference:
            self._seen = _Seen.of(live)
        return difference

    def _difference(self, live: Mapping[str, torch.Tensor]) -> str:
        for name, dtype, shape in self._expected:
            tensor = live.get(name)
            if tensor is None:
                return f"{name} has gone"
            if tensor.dtype != dtype or tensor.shape != shape:
                return f"{name} is now {tensor.dtype} {list(tensor.shape)}"
            if not has_memory(tensor):
                return f"{name} has no memory any more"
        if len(live) != len(self._expected):
            known = {name for name, _, _ in self._expected}
            return f"{min(live.keys() - known)} is new"
        for name, owner, distance in self._aliases:
            if live[name].data_ptr() != live[owner].data_ptr() + distance:
                return f"{name} no longer shares memory with {owner}"
        return ""

    def items(self, live: Mapping[str, torch.Tensor], slot: int) -> Items:
        """The copies of one snapshot: at the boundary, and lazily.

        ``live`` must be what ``mismatch`` or ``settle`` was asked of last.
        """
        cached = self._cached  # forget() may come in between
        if slot not in cached:
            cached[slot] = self._items(live, slot)
        return cached[slot]

    def _items(self, live: Mapping[str, torch.Tensor], slot: int) -> Items:
        now, later = CopyList(), CopyList()
        for entry, target in zip(self._owners, self._targets[slot], strict=True):
            source = live_part(live[entry.name], entry)
            (now if entry.boundary else later).append(CopyItem(source, target))
        return now, later

    def forget(self) -> None:
        """Let go of the tensors of last time, and of all views of their memory.

        A copy that still runs may keep some, until the next snapshot at most.
        """
        self._seen, self._cached = None, {}

    def release(self) -> None:
        """Drop all views of the arena, so that it can be unmapped."""
        self._targets.clear()
        self._cached.clear()
