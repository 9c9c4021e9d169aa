"""Flip random bits of real arenas and print what became of them.

python -m tests.support.bit_flips --flips 1000000

Exit code 1 if a flip was missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena.arena import NO_PROGRESS, Arena
from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.arena.format import ArenaHeader, Geometry, Permit, SlotHeader, SlotState
from megatron_ft.core.errors import ArenaError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.inspect_slot import Damage, SlotInspector
from megatron_ft.erasure.member import code_of, member_of, parity_digests_of, parity_root, piece_of
from tests.support import damage as r

BLOCK_BYTES, SLOT, ITERATION = 1024, 0, 10
PERMIT = Permit(SnapshotId(1, 1), ITERATION, SLOT)
BLOCKS = (*r.IN_BLOCKS, r.PADDING)
COMPARE_EVERY = 2000
OUTCOMES = ("found", "mended", "refused", "ignored", "missed")
Counts = Mapping[str, Counter[str]]
"""Outcomes of the flipped bits of each region."""


def flip(scheme: str, flips: int, seed: int, folder: Path | None = None) -> Counts:
    """At least ``flips`` flips on one stripe.

    Every COMPARE_EVERY trials all bytes of all arenas are compared with what they were:
    AssertionError if anything else was written.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="megatron-ft-flips-") as place:
        stripe = Stripe(Path(place), Scheme.parse(scheme), seed)
        trials, done, number = Trials(stripe, random.Random(seed)), 0, 0
        try:
            while done < flips:
                done += trials.one()
                number += 1
                if number % COMPARE_EVERY == 0 or done >= flips:
                    assert not stripe.differing(), f"wrong bytes after {done} flips, seed {seed}"
        finally:
            stripe.close()
    return trials.counts


class Stripe:
    """Arenas of all members in ``folder``, one committed protected snapshot in each.

    ``raw`` are the files as bytes that can be changed, ``whole`` what they should be.
    """

    def __init__(self, folder: Path, scheme: Scheme, seed: int, tensor_bytes: int = 11_000) -> None:
        self._dice = np.random.default_rng(seed)
        self._members = tuple(f"shard{number}" for number in range(scheme.members))
        self.paths = [folder / f"{shard}.arena" for shard in self._members]
        self.headers = [self._header(n, scheme, tensor_bytes) for n in range(scheme.members)]
        given = zip(self.paths, self.headers, strict=True)
        self.arenas = [Arena.create(path, header) for path, header in given]
        self.geometry, self.code = self.headers[0].geometry, code_of(self.headers[0])
        self._protect([self._seal(n, tensor_bytes - 700 * n) for n in range(scheme.members)])
        self.slots = [[a.slot(i) for i in range(a.geometry.slot_count)] for a in self.arenas]
        self.views = [
            member_of(arena, SLOT, slots[SLOT], data=True, parity=True)
            for arena, slots in zip(self.arenas, self.slots, strict=True)
        ]
        self.raw: list[NDArray[np.uint8]] = [np.memmap(p, np.uint8, "r+") for p in self.paths]
        self.whole = [raw.copy() for raw in self.raw]

    def regions(self, member: int) -> list[r.Region]:
        record = self.slots[member][SLOT].record
        assert record is not None
        return list(r.regions(self.arenas[member], record, SLOT))

    def remember_control(self, member: int) -> None:
        """Headers were written anew, with higher versions: that is how they should be now."""
        control = slice(0, self.geometry.control_bytes)
        self.whole[member][control] = self.raw[member][control]

    def differing(self) -> int:
        """Bytes in which data, parity or digests are not what they were, in all arenas."""
        start, pairs = self.geometry.control_bytes, zip(self.raw, self.whole, strict=True)
        return sum(int(np.count_nonzero(raw[start:] != whole[start:])) for raw, whole in pairs)

    def close(self) -> None:
        """Unmap everything; the files stay."""
        self.raw.clear()
        self.views.clear()
        for arena in self.arenas:
            arena.close()

    def _header(self, number: int, scheme: Scheme, tensor_bytes: int) -> ArenaHeader:
        k, m = scheme.data_members, scheme.parity_members
        geometry = Geometry.for_stripe(
            slot_count=2,
            required_bytes=required_bytes(tensor_bytes, 100, BLOCK_BYTES),
            data_members=k,
            parity_members=m,
            block_bytes=BLOCK_BYTES,
        )
        return ArenaHeader(
            job=uuid.UUID(int=1),
            shard_id=self._members[number],
            incarnation=1,
            lineage=(Ancestor(1, None),),
            codec=scheme.kind,
            data_members=k,
            parity_members=m,
            member_index=number,
            members=self._members,
            geometry=geometry,
        )

    def _seal(self, number: int, tensor_bytes: int) -> SealedRecord:
        arena = self.arenas[number]
        data = arena.data(SLOT, writable=True)
        data[:tensor_bytes] = self._dice.integers(0, 256, tensor_bytes, np.uint8)
        arena.write_permit(PERMIT)
        arena.write_progress(ITERATION)
        return seal(
            data,
            shard_id=self._members[number],
            snapshot=PERMIT.snapshot,
            iteration=ITERATION,
            tensor_bytes=tensor_bytes,
            meta=b"small objects",
            layout_hash=bytes(32),
            block_bytes=BLOCK_BYTES,
        )

    def _protect(self, records: list[SealedRecord]) -> None:
        """Parity of every row, its digests, and headers that say so."""
        sealed = SlotHeader(
            SlotState.COMMITTED, PERMIT.snapshot, ITERATION, stripe_table=tuple(records)
        )
        headers, code = [replace(sealed, record=record) for record in records], self.code
        pairs = zip(self.arenas, headers, strict=True)
        views = [member_of(arena, SLOT, one, data=True, parity=True) for arena, one in pairs]
        kernel, whole = code.codec().encode_kernel(), slice(0, code.chunk_bytes)
        for row in range(code.members):
            holders = [code.layout.holder(row, symbol) for symbol in range(code.members)]
            pieces = [piece_of(code, views[n], n, row, whole) for n in holders]
            kernel(pieces[: code.data_members], pieces[code.data_members :])
        for arena, header, view in zip(self.arenas, headers, views, strict=True):
            view.parity_digests[:] = parity_digests_of(code, view.parity)
            root = parity_root(view.parity_digests)
            arena.write_slot(SLOT, replace(header, parity_valid=True, parity_root=root))


class Trials:
    """Each flips bits, asks the product's own checks and compares; arenas are whole in between."""

    def __init__(self, stripe: Stripe, dice: random.Random) -> None:
        self.stripe, self.dice = stripe, dice
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._regions = [stripe.regions(member) for member in range(stripe.code.members)]

    def one(self) -> int:
        """One trial; the number of bits that it flipped."""
        member = self.dice.randrange(self.stripe.code.members)
        choice = self._regions[member]
        (region,) = self.dice.choices(choice, [3 if x.name in BLOCKS else 1 for x in choice])
        if region.stop <= region.start:
            return 0
        # What is not in blocks but the preamble is stored twice; both copies may be hit.
        twice = region.name not in (*BLOCKS, r.PREAMBLE) and self.dice.random() < 0.1
        hit = [x for x in choice if x.name == region.name] if twice else [region]
        places = [self._flip(member, one) for one in hit]
        outcome = self._outcome(member, region, places[0])
        if outcome == "mended" and twice:
            outcome = "missed"
        self.counts[region.name][outcome] += len(places)
        for at in places:
            self.stripe.raw[member][at] = self.stripe.whole[member][at]
        return len(places)

    def _flip(self, member: int, region: r.Region) -> int:
        at = self.dice.randrange(region.start, region.stop)
        self.stripe.raw[member][at] ^= 1 << self.dice.randrange(8)
        return at

    def _outcome(self, member: int, region: r.Region, at: int) -> str:
        if region.name in BLOCKS:
            inspector = SlotInspector(self.stripe.code, self.stripe.views[member], parity=True)
            found = inspector.damage(0, inspector.blocks)
            if region.name == r.PADDING:
                return "missed" if found else "ignored"
            return "found" if found == self._damage_at(region, at) else "missed"
        if region.name in (r.PERMIT, r.PROGRESS):
            return self._read_word(member, region)
        if region.name == r.PREAMBLE:
            try:
                Arena.open(self.stripe.paths[member]).close()
            except ArenaError:
                return "refused"
            return "missed"
        return self._read_header(member, region)

    def _damage_at(self, region: r.Region, at: int) -> Damage:
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

    def _read_word(self, member: int, region: r.Region) -> str:
        """Their writers write them anew all the time; a reader takes the whole copy, or none."""
        arena = self.stripe.arenas[member]
        try:
            if region.name == r.PERMIT:
                read, whole, nothing = arena.permit(), PERMIT, None
                return _word(read == whole, read is nothing)
            progress = arena.progress()
            return _word(progress == ITERATION, progress == NO_PROGRESS)
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
        if [arena.header, arena.slot(SLOT)] != known or r.damaged_records(arena):
            return "missed"
        stripe.remember_control(member)
        return "refused" if header is None else "mended"


def _word(right: bool, nothing: bool) -> str:
    return "refused" if nothing else "mended" if right else "missed"


def table(counts: Counts) -> str:
    rows = [("bits of", "flipped", *OUTCOMES), ("---", *["---:"] * 6)]
    for name, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        numbers = (sum(count.values()), *(count[outcome] for outcome in OUTCOMES))
        rows.append((name, *(f"{number:,}" for number in numbers)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.bit_flips")
    parser.add_argument("--flips", type=int, default=1_000_000, help="bits (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--protect", default="rs:2+2", help="scheme (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="%(default)s")
    options = parser.parse_args()
    counts = flip(options.protect, options.flips, options.seed, options.folder)
    print(f"{table(counts)}\n\n{options.protect}, seed {options.seed}")
    return int(any(count["missed"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
