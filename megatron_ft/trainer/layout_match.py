"""Layouts and tensors as columns: what is asked of thousands of tensors, in calls that loop in C.

A plan takes microseconds for each tensor, which delays a restart; whether a layout is what would
be planned can be told in a tenth of that, for most states.

Tensors whose bytes are stored with another one's, such as tied weights: when a plan says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from operator import attrgetter, is_, lt, methodcaller
from typing import NamedTuple

import numpy as np
import torch

from megatron_ft.core.shard import ALIGNMENT, LayoutEntry, LogicalPlace, ShardLayout
from megatron_ft.trainer.addresses import has_memory
from megatron_ft.trainer.enumeration import DENSE
from megatron_ft.trainer.plan import Planned, dtype_name, known_dtype


class Alias(NamedTuple):
    """An entry without bytes of its own, that of its owner, and the owner's place among those."""

    entry: LayoutEntry
    owner: LayoutEntry
    number: int

    @classmethod
    def all_of(
        cls, entries: list[LayoutEntry], owners: tuple[LayoutEntry, ...]
    ) -> list[Alias] | None:
        """None if one has no owner here, or is not what a plan would make of one."""
        numbers = {owner.name: number for number, owner in enumerate(owners)}
        if not {entry.alias_of for entry in entries} <= numbers.keys():
            return None
        places = [(entry, numbers[entry.alias_of]) for entry in entries]
        found = [cls(entry, owners[number], number) for entry, number in places]
        return found if all(alias._is_planned() for alias in found) else None

    @property
    def start(self) -> int:
        """Where its bytes begin in those of its owner."""
        return self.entry.offset - self.owner.offset

    def _is_planned(self) -> bool:
        entry, owner = self.entry, self.owner
        within = 0 <= self.start and self.start + entry.nbytes <= owner.nbytes
        return within and entry.nbytes > 0 and entry.boundary == owner.boundary

    def lies_there(self, addresses: list[int], address: int) -> bool:
        """Whether it is in this part of its owner, given where all owners are."""
        return address == addresses[self.number] + self.start

    def is_left_to_owner(self, boundary: Collection[str]) -> bool:
        """Whether a plan leaves it to this owner, if those of ``boundary`` may change in forward.

        Of two that have the same bytes the first owns them; see shard.plan_layout.
        """
        entry, owner = self.entry, self.owner
        changes = entry.name in boundary
        if changes and not owner.boundary:
            return False
        twins = (entry.offset, entry.nbytes) == (owner.offset, owner.nbytes)
        return not twins or (not owner.boundary, owner.name) < (not changes, entry.name)


_LAYOUT, _DTYPE = attrgetter("layout"), attrgetter("dtype")
_IS_CPU, _IS_META = attrgetter("is_cpu"), attrgetter("is_meta")
_QUANTIZED = methodcaller("startswith", "q")


class WholeLayout(NamedTuple):
    """The fields of a layout of tensors all of whose bytes are stored here.

    Those that own bytes come first: sorted by name, one behind the other, as a plan puts them.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    logical: list[LogicalPlace | None]
    offsets: list[int]
    lengths: list[int]
    boundary: frozenset[str]
    aliases: list[Alias]

    @classmethod
    def of(cls, layout: ShardLayout) -> WholeLayout | None:
        """None if it is of another kind, or of dtypes that this torch lacks."""
        entries = layout.entries
        shared = [entry for entry in entries if entry.alias_of]
        owned = tuple([entry for entry in entries if not entry.alias_of]) if shared else entries
        aliases = Alias.all_of(shared, owned) if shared else []
        dtypes = _dtypes({entry.dtype for entry in entries})
        if aliases is None or dtypes is None or not _are_whole(entries, dtypes):
            return None
        entries = (*owned, *shared)
        whole = cls(
            [entry.name for entry in entries],
            [entry.shape for entry in entries],
            [dtypes[entry.dtype] for entry in entries],
            [entry.logical for entry in entries],
            [entry.offset for entry in owned],
            [entry.nbytes for entry in owned],
            frozenset([entry.name for entry in owned if entry.boundary]),
            aliases,
        )
        return whole if whole._is_packed(layout.tensor_bytes) else None

    def _is_packed(self, tensor_bytes: int) -> bool:
        """Sorted by name, one behind the other, as plan_layout puts them."""
        sizes = np.array(self.lengths, np.int64)
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
        at = [*self.offsets, tensor_bytes] == [0, *ends]
        owners = self.names[: len(self.offsets)]
        alone = not self.aliases or len({*self.names}) == len(self.names)
        return at and alone and all(map(lt, owners, owners[1:]))


class WholeTensors(NamedTuple):
    """Live tensors that a plan would give the very bytes of a stored layout, in its order.

    What a plan takes from elsewhere is compared by ``agrees``.
    """

    stored: WholeLayout
    tensors: list[torch.Tensor]
    addresses: list[int]
    on_cpu: bool

    @classmethod
    def of(cls, stored: WholeLayout, live: Mapping[str, torch.Tensor]) -> WholeTensors | None:
        """None if something differs, or only planning can tell: other tensors share memory.

        Shared memory is the same for CUDA tensors: addresses are unique over all devices.
        """
        if len(live) != len(stored.names):
            return None
        try:
            tensors = list(map(live.__getitem__, stored.names))
        except KeyError:
            return None
        on_cpu = all(map(_IS_CPU, tensors))
        if not (_are_dense(tensors, on_cpu) and _have_form(tensors, stored)):
            return None
        found = cls(stored, tensors, list(map(torch.Tensor.data_ptr, tensors)), on_cpu)
        if 0 in found.addresses and not all(map(has_memory, tensors)):
            return None
        apart = _lie_apart(found.addresses[: len(stored.lengths)], stored.lengths)
        return found if apart and found._share() else None

    def are_plain(self) -> bool:
        """Whether copies of bytes are all that it takes to fill them."""
        every, tensors = torch.Tensor, self.tensors
        # Of no other dtype are numbers that torch conjugates later.
        complex_ones = any(dtype.is_complex for dtype in {*self.stored.dtypes})
        return (
            self.on_cpu
            and all(map(every.is_contiguous, tensors))
            and not any(map(every.is_neg, tensors))
            and not (complex_ones and any(map(every.is_conj, tensors)))
        )

    def agrees(self, planned: Planned) -> bool:
        """Whether ``planned.layout()`` would be interchangeable with the stored one, by now."""
        stored = self.stored
        fits = self._stayed(planned.live) or WholeTensors.of(stored, planned.live) is not None
        left = all(alias.is_left_to_owner(planned.boundary) for alias in stored.aliases)
        boundary = {*planned.boundary} - {alias.entry.name for alias in stored.aliases}
        same = boundary == stored.boundary and left and not planned.splits
        return fits and same and _are_at(stored, planned.places)

    def _share(self) -> bool:
        """Whether each alias is where it was in its owner; a plan looks at contiguous ones."""
        aliases, addresses = self.stored.aliases, self.addresses
        own = len(self.stored.lengths)
        owners = [self.tensors[alias.number] for alias in aliases]
        return all(map(torch.Tensor.is_contiguous, [*owners, *self.tensors[own:]])) and all(
            alias.lies_there(addresses, address)
            for alias, address in zip(aliases, addresses[own:], strict=True)
        )

    def _stayed(self, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether these very tensors are all there are, where they were and as they were."""
        names, tensors = self.stored.names, self.tensors
        return (
            len(live) == len(tensors)
            and all(map(is_, map(live.get, names), tensors))
            and list(map(torch.Tensor.data_ptr, tensors)) == self.addresses
            and _have_form(tensors, self.stored)
            and self._share()
        )


def _dtypes(names: set[str]) -> dict[str, torch.dtype] | None:
    """By name; None if there is one that this torch lacks, or whose tensors a plan refuses."""
    found = {dtype_name(dtype): dtype for dtype in map(known_dtype, names) if dtype is not None}
    return found if found.keys() == names and not any(map(_QUANTIZED, names)) else None


def _are_whole(entries: tuple[LayoutEntry, ...], dtypes: dict[str, torch.dtype]) -> bool:
    """Whether each has as many bytes here as its shape and dtype have elements."""
    if any([entry.start or entry.parts != 1 for entry in entries]):
        return False
    widths = {name: dtype.itemsize for name, dtype in dtypes.items()}
    counted = [entry.stop for entry in entries] == [prod(entry.shape) for entry in entries]
    sizes = [entry.stop * widths[entry.dtype] for entry in entries]
    return counted and [entry.nbytes for entry in entries] == sizes


def _have_form(tensors: list[torch.Tensor], stored: WholeLayout) -> bool:
    """Whether each has the shape and the dtype, and so the length, that is stored."""
    shapes: list[tuple[int, ...]] = list(map(torch.Tensor.size, tensors))
    return shapes == stored.shapes and list(map(_DTYPE, tensors)) == stored.dtypes


def _are_dense(tensors: list[torch.Tensor], on_cpu: bool) -> bool:
    """Whether a plan refuses none of them for its kind, quantized ones excepted."""
    kinds = {*map(type, tensors)} <= DENSE and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return kinds and (on_cpu or not any(map(_IS_META, tensors)))


def _lie_apart(addresses: list[int], lengths: list[int]) -> bool:
    starts, sizes = np.array(addresses, np.int64), np.array(lengths, np.int64)
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    return bool((ends[:-1] <= starts[order][1:]).all())


def _are_at(stored: WholeLayout, places: Mapping[str, LogicalPlace]) -> bool:
    """Whether no tensor has another place in the unsharded model, where both sides know it."""
    live = map(places.get, stored.names)
    return not places or all(
        there == here or there is None or here is None
        for there, here in zip(stored.logical, live, strict=True)
    )
