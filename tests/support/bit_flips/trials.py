"""One trial: flip bits, ask the product's own checks, have it repaired or refused, compare."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from megatron_ft.arena.arena import NO_PROGRESS, Arena
from megatron_ft.core.errors import ArenaError
from megatron_ft.erasure.block_repair import (
    Checks,
    Damage,
    RowSolver,
    SlotInspector,
    mend_data,
    mend_parity,
    place_of,
    places_of,
)
from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    MemberView,
    ParityCheck,
    digest_table_of,
    piece_of,
)
from tests.support import damage as r
from tests.support.arena_damage import damaged_records
from tests.support.bit_flips.stripe import ITERATION, PERMIT, SLOT, Stripe


@dataclass
class Count:
    """Flipped bits of one region, and what became of them."""

    flips: int = 0
    repaired: int = 0
    refused: int = 0
    missed: int = 0

    def add(self, other: Count) -> None:
        """Add another process's count."""
        for name in ("flips", "repaired", "refused", "missed"):
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
        self._solver = RowSolver(stripe.code)
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
        (region,) = self.dice.choices(choice, [3 if x.name in r.IN_BLOCKS else 1 for x in choice])
        if region.stop <= region.start:
            return 0
        if region.name in r.IN_BLOCKS:
            return self._blocks(member, region)
        if region.name == r.PREAMBLE:
            return self._preamble(member, region)
        return self._record(member, region)

    # Data, parity and their digests.

    def _blocks(self, member: int, region: r.Region) -> int:
        """One damaged member, or several in one row: one more than the parity at most."""
        others = [n for n in range(self.stripe.code.members) if n != member]
        several = self.dice.random() < 0.1
        most = self.stripe.code.parity_members if several else 0
        also = self.dice.sample(others, self.dice.randint(min(1, most), most))
        at = self._flip(member, region)
        block, parity = self._block_at(member, region, at)
        place = place_of(self.stripe.code, member, block, parity=parity)
        harmed = {member: [at]}
        for other in also:
            harmed[other] = [self._flip_piece(other, place.row, place.offset)]
        repairable = len(harmed) <= self.stripe.code.parity_members
        for number in harmed:
            outcome = self._repair(number)
            if outcome == "repaired" and not self._is_as_before(harmed, number):
                outcome = "missed"
            self._count(region.name, outcome, repairable)
        self._undo(harmed)
        return len(harmed)

    def _block_at(self, member: int, region: r.Region, at: int) -> tuple[int, bool]:
        geometry, size = self.stripe.geometry, self.stripe.code.block_bytes
        if region.name == r.PARITY_DIGESTS:
            return (at - geometry.parity_digest_offset(SLOT)) // 8, True
        if region.name == r.PARITY:
            return (at - geometry.parity_offset(SLOT)) // size, True
        return (at - geometry.data_offset(SLOT)) // size, False

    def _flip_piece(self, member: int, row: int, offset: int) -> int:
        """Flip a bit of what a member keeps of a row, in the block at ``offset`` of the chunk."""
        code, geometry = self.stripe.code, self.stripe.geometry
        symbol = code.layout.symbol(row, member)
        parity = code.layout.is_parity(symbol)
        start = geometry.parity_offset(SLOT) if parity else geometry.data_offset(SLOT)
        start += code.layout.chunk(symbol) * code.chunk_bytes + offset
        return self._flip(member, r.Region("", start, start + code.block_bytes))

    def _flip(self, member: int, region: r.Region) -> int:
        at = self.dice.randrange(region.start, region.stop)
        self.stripe.raw[member][at] ^= 1 << self.dice.randrange(8)
        return at

    def _repair(self, member: int) -> str:
        """Find the damage of a member and repair it as SMP and encoders do, in this process."""
        code, view = self.stripe.code, self._views[member]
        found = False
        for _ in range(2):  # what a damaged digest table vouches for is known after its repair
            inspector = SlotInspector(code, view, parity=True)
            damage = inspector.damage(0, inspector.blocks)
            if not damage:
                return "repaired" if found else "missed"
            found = True
            if not self._mend(member, damage):
                return "refused"
        return "refused"

    def _mend(self, member: int, damage: Damage) -> bool:
        code, view = self.stripe.code, self._views[member]
        checks = {n: self._checks(v) for n, v in enumerate(self._views) if n != member}
        blocks: dict[bool, dict[int, np.ndarray]] = {False: {}, True: {}}
        for parity, block, place in places_of(code, member, damage):
            part = slice(place.offset, place.offset + code.block_bytes)
            pieces = {n: piece_of(code, self._views[n], n, place.row, part) for n in checks}
            solved = self._solver.solve_block(place, member, pieces, checks)
            if solved is None:
                return False
            blocks[parity][block] = solved
        data = not blocks[False] or mend_data(code, view, blocks[False])
        parity_done = not blocks[True] or mend_parity(code, view, blocks[True])
        return data and parity_done

    def _checks(self, view: MemberView) -> Checks:
        code = self.stripe.code
        assert view.record is not None
        data = parity = None
        with suppress(CorruptMemberError):
            data = DataCheck(code, view.record, digest_table_of(view))
        with suppress(CorruptMemberError):
            shard = view.record.shard_id
            parity = ParityCheck(code, shard, view.parity_digests, view.parity_root)
        return data, parity

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
            self._count(region.name, outcome, not both)
        return len(harmed[member])

    def _read_word(self, member: int, region: r.Region) -> str:
        """Their writers write them anew all the time; a reader takes the whole copy, or none."""
        arena = self.stripe.arenas[member]
        try:
            if region.name == r.PERMIT:
                permit = arena.permit()
                return "refused" if permit is None else _repaired_if(permit == PERMIT)
            progress = arena.progress()
            return "refused" if progress == NO_PROGRESS else _repaired_if(progress == ITERATION)
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
        return "refused" if header is None else "repaired"

    def _preamble(self, member: int, region: r.Region) -> int:
        harmed = {member: [self._flip(member, region)]}
        try:
            Arena.open(self.stripe.paths[member]).close()
            outcome = "missed"
        except ArenaError:
            outcome = "refused"
        self._count(region.name, outcome, False)
        self._undo(harmed)
        return 1

    # Judging.

    def _is_as_before(self, harmed: dict[int, list[int]], member: int) -> bool:
        raw, whole = self.stripe.raw[member], self.stripe.whole[member]
        return all(raw[at] == whole[at] for at in harmed[member])

    def _count(self, region: str, outcome: str, repairable: bool) -> None:
        """Count one flip; what can be repaired must be, and then every byte must be right."""
        count = self.counts.setdefault(region, Count())
        count.flips += 1
        if (repairable and outcome != "repaired") or (not repairable and outcome == "repaired"):
            outcome = "missed"
        setattr(count, outcome, getattr(count, outcome) + 1)

    def _undo(self, harmed: dict[int, list[int]]) -> None:
        """Give every flipped byte its value again: refusals leave them as they are."""
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


def _repaired_if(right: bool) -> str:
    return "repaired" if right else "missed"
