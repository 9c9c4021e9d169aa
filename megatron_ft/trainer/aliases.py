"""Tensors whose bytes are stored with another one's, such as tied weights: when a plan says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatron_ft.core.shard import LayoutEntry


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
