"""One trial: flip bits, ask the product's own checks, compare."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from megatron_ft.arena.arena import NO_PROGRESS, Arena
from megatron_ft.core.errors import ArenaError
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from tests.support import damage as r
from tests.support.arena_damage import damaged_records
from tests.support.bit_flips.stripe import ITERATION, PERMIT, SLOT, Stripe

BLOCKS = (*r.IN_BLOCKS, r.PADDING)


@dataclass
class Count:
    """Flipped bits of one region, and what became of them."""

    flips: int = 0
    found: int = 0
    mended: int = 0
    refused: int = 0
    ignored: int = 0
    missed: int = 0

    def add(self, other: Count) -> None:
        """Add another process's count."""
        for name in ("flips", "found", "mended", "refused", "ignored", "missed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Trials:
    """Trials on one stripe; ``counts`` by region.  The arenas are whole between two trials."""

    stripe: Stripe
    dice: random.Random
    counts: dict[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the regions of every member."""
        stripe = self.stripe
        self._regions = []
        for arena, slots in zip(stripe.arenas, stripe.slots, strict=True):
            record = slots[SLOT].record
            assert record is not None
            self._regions.append(list(r.regions(arena, record, SLOT)))
        self._views = [stripe.view(member) for member in range(stripe.code.members)]

    def one(self) -> int:
        """One trial; the number of bits that it flipped."""
        member = self.dice.randrange(self.stripe.code.members)
        choice = self._regions[member]
        (region,) = self.dice.choices(choice, [3 if x.name in BLOCKS else 1 for x in choice])
        if region.stop <= region.start:
            return 0
        if region.name in BLOCKS:
            return self._blocks(member, region)
        if region.name == r.PREAMBLE:
            return self._preamble(member, region)
        return self._record(member, region)

    # Data, parity and their digests.

    def _blocks(self, member: int, region: r.Region) -> int:
        """One bit, which the inspector must find in its block and nowhere else, or ignore."""
        at = self._flip(member, region)
        inspector = SlotInspector(self.stripe.code, self._views[member], parity=True)
        found = inspector.damage(0, inspector.blocks)
        if region.name == r.PADDING:
            outcome = "missed" if found else "ignored"
        else:
            outcome = "found" if found == self._damage_at(member, region, at) else "missed"
        self._count(region.name, outcome)
        self._undo({member: [at]})
        return 1

    def _damage_at(self, member: int, region: r.Region, at: int) -> Damage:
        """The block of a byte; for the digest table all that hold some of it."""
        geometry, size = self.stripe.geometry, self.stripe.code.block_bytes
        base = geometry.data_offset(SLOT)
        if region.name == r.PARITY_DIGESTS:
            return Damage(parity=((at - geometry.parity_digest_offset(SLOT)) // 8,))
        if region.name == r.PARITY:
            return Damage(parity=((at - geometry.parity_offset(SLOT)) // size,))
        if region.name == r.TABLE:
            first, last = (region.start - base) // size, (region.stop - 1 - base) // size
            return Damage(data=tuple(range(first, last + 1)))
        return Damage(data=((at - base) // size,))

    def _flip(self, member: int, region: r.Region) -> int:
        at = self.dice.randrange(region.start, region.stop)
        self.stripe.raw[member][at] ^= 1 << self.dice.randrange(8)
        return at

    # Headers, permit, progress: stored twice.

    def _record(self, member: int, region: r.Region) -> int:
        """One copy or both: the value is that of the whole copy, or it is refused."""
        both = self.dice.random() < 0.1
        twins = [x for x in self._regions[member] if x.name == region.name]
        harmed = {member: [self._flip(member, one) for one in (twins if both else [region])]}
        if region.name in (r.PERMIT, r.PROGRESS):
            outcome = self._read_word(member, region)
            self._undo(harmed)
        else:
            outcome = self._read_header(member, region)
        for _ in harmed[member]:
            if outcome == "mended" and both:
                outcome = "missed"
            self._count(region.name, outcome)
        return len(harmed[member])

    def _read_word(self, member: int, region: r.Region) -> str:
        """Their writers write them anew all the time; a reader takes the whole copy, or none."""
        arena = self.stripe.arenas[member]
        try:
            if region.name == r.PERMIT:
                permit = arena.permit()
                return "refused" if permit is None else _mended_if(permit == PERMIT)
            progress = arena.progress()
            return "refused" if progress == NO_PROGRESS else _mended_if(progress == ITERATION)
        except ArenaError:
            return "refused"

    def _read_header(self, member: int, region: r.Region) -> str:
        arena, stripe = self.stripe.arenas[member], self.stripe
        known = [stripe.headers[member], stripe.slots[member][SLOT]]
        try:
            header = arena.header if region.name == r.ARENA_HEADER else arena.slot(SLOT)
        except ArenaError:
            header = None
        if header is not None and header not in known:
            return "missed"
        # Its writer remembers the value, so even two damaged copies are written anew.
        if not arena.mend_records(stripe.headers[member], stripe.slots[member]):
            return "missed"
        again = [arena.header, arena.slot(SLOT)]
        if again != known or damaged_records(arena):
            return "missed"
        stripe.remember_control(member)
        return "refused" if header is None else "mended"

    def _preamble(self, member: int, region: r.Region) -> int:
        harmed = {member: [self._flip(member, region)]}
        try:
            Arena.open(self.stripe.paths[member]).close()
            outcome = "missed"
        except ArenaError:
            outcome = "refused"
        self._count(region.name, outcome)
        self._undo(harmed)
        return 1

    # Judging.

    def _count(self, region: str, outcome: str) -> None:
        """Count one flip."""
        count = self.counts.setdefault(region, Count())
        count.flips += 1
        setattr(count, outcome, getattr(count, outcome) + 1)

    def _undo(self, harmed: dict[int, list[int]]) -> None:
        """Give every flipped byte its value again."""
        for member, places in harmed.items():
            for at in places:
                self.stripe.raw[member][at] = self.stripe.whole[member][at]

    def differing(self) -> int:
        """Bytes in which data, parity or digests are not what they were, in all arenas."""
        start = self.stripe.geometry.control_bytes
        return sum(
            int(np.count_nonzero(raw[start:] != whole[start:]))
            for raw, whole in zip(self.stripe.raw, self.stripe.whole, strict=True)
        )


def _mended_if(right: bool) -> str:
    return "mended" if right else "missed"
