"""Loading a shard: verified and copied in place, then checked against what was stored.

Tensors that were filled one by one and turn out to share memory: whose bytes are there now?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import BlockCheck
from megatron_ft.arena.mapping import populate_read
from megatron_ft.core.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry, Meta, ShardLayout, layout_differences, unpack_meta
from megatron_ft.trainer.addresses import has_memory, reach_bytes
from megatron_ft.trainer.binding import live_part, region_tensor, stored_view
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.cpu import is_plain_memory
from megatron_ft.trainer.fill import Cuts, Spans, VerifiedCopy, chunk_blocks, copy_in_threads
from megatron_ft.trainer.layout_match import WholeLayout, WholeTensors
from megatron_ft.trainer.plan import (
    Planned,
    SplitTensor,
    check_group,
    dtype_from_name,
    dtype_name,
    exchange,
    exchange_device,
)
from megatron_ft.trainer.state import AdoptsTensors, TrainingState, live_tensors


class Filled(NamedTuple):
    """A tensor that was given the bytes of an entry."""

    entry: LayoutEntry
    tensor: torch.Tensor

    def holds(self, region: torch.Tensor) -> bool:
        """Whether it has them still."""
        now = live_part(self.tensor.detach().resolve_conj().resolve_neg(), self.entry)
        return torch.equal(_bytes(now.cpu()), _bytes(stored_view(region, self.entry)))


def require_all_held(filled: Sequence[Filled], region: torch.Tensor) -> None:
    """LayoutMismatchError if filling one tensor has changed another.

    A plan makes one entry of what lies within a contiguous tensor; others that overlap, such as
    transposed weights that are tied, have bytes of their own each.  These are equal if the
    tensors shared memory when they were saved as well.
    """
    places = [(one.tensor.data_ptr(), reach_bytes(one.tensor)) for one in filled]
    wrong = [filled[n].entry.name for n in that_touch(places) if not filled[n].holds(region)]
    if wrong:
        raise LayoutMismatchError(
            f"{len(wrong)} tensors share memory with others here and have other values than those "
            f"in the snapshot: {', '.join(sorted(wrong)[:8])}. Give each tensor memory of its own, "
            "as in the run that saved it"
        )


def that_touch(places: Sequence[tuple[int, int]]) -> list[int]:
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


Report = Callable[[int], None]


class Contents(NamedTuple):
    """What a sealed shard says of itself, and what follows from it for any state.

    ``whole`` is None if only planning can tell whether a state fits.
    """

    layout: ShardLayout
    objects: bytes
    whole: WholeLayout | None
    cuts: Cuts | None


class SealedShard:
    """One sealed slot of an arena, about to be read: nothing of it is used unverified.

    ``report`` is told the number of bad blocks before CorruptBlockError names them.
    """

    def __init__(self, arena: Arena, slot: int, record: SealedRecord, report: Report) -> None:
        """Nothing is read yet but the arena's header and the digest table."""
        header = arena.header
        self.region, self.record = arena.data(slot), record
        self.block_bytes = header.geometry.block_bytes
        self.check = BlockCheck(
            self.region,
            record,
            self.block_bytes,
            header.digest_algorithm,
            run=chunk_blocks(self.block_bytes),
        )
        self._contents: Contents | None = None
        self._report = report
        self._name = f"shard {record.shard_id}, snapshot {record.snapshot}, slot {slot} of"
        self._name += f" {arena.path}"

    def prepare(self) -> None:
        """Keep the contents for when they are asked for, unless blocks of theirs are bad."""
        if not self._bad_meta():
            self._contents = self._read_contents()

    def map_pages(self) -> None:
        """Let who reads it next take no page faults."""
        populate_read(self.region[: self.record.used_bytes])

    def contents(self) -> Contents:
        """The layout and the small objects, their digests compared; tensors are not read.

        CorruptBlockError, and LayoutMismatchError if they were written by another release.
        """
        if self._contents is None:
            self.require_none(self._bad_meta())
            self._contents = self._read_contents()
        return self._contents

    def meta(self) -> Meta:
        """As contents, not decoded."""
        self.require_none(self._bad_meta())
        return self._read_meta()

    def cut(self, offsets: list[int], lengths: list[int]) -> Cuts:
        """Spans of tensors, cut for VerifiedCopy, which looks at all blocks that hold tensors.

        So a block that holds both tensors and small objects is verified for each of them.
        """
        blocks = digest.table_entries(self.record.tensor_bytes, self.block_bytes)
        return Cuts.of(offsets, lengths, blocks, self.block_bytes)

    def require_none(self, bad: list[int]) -> None:
        """CorruptBlockError if there are bad blocks."""
        if not bad:
            return
        self._report(len(bad))
        raise CorruptBlockError(
            f"{self._name}: {len(bad)} of its blocks of {self.block_bytes} bytes do not match "
            f"their digests ({digest.name_blocks(bad)}); no byte of them was loaded, rebuild the "
            "shard from its stripe"
        )

    def _bad_meta(self) -> list[int]:
        first = digest.first_meta_block(self.record, self.block_bytes)
        return self.check.bad(first, self.check.blocks)

    def _read_meta(self) -> Meta:
        return unpack_meta(digest.read_meta(self.region, self.record))

    def _read_contents(self) -> Contents:
        meta = self._read_meta()
        layout = ShardLayout.from_bytes(meta.layout)
        if layout.tensor_bytes != self.record.tensor_bytes:
            raise LayoutMismatchError(
                f"{self._name}: the stored layout is of {layout.tensor_bytes} bytes of tensors and "
                f"its record of {self.record.tensor_bytes}; restore another snapshot"
            )
        whole = WholeLayout.of(layout)
        cuts = None if whole is None else self.cut(whole.offsets, whole.lengths)
        return Contents(layout, meta.objects, whole, cuts)


def restore_shard(shard: SealedShard, state: TrainingState, split_bytes: int) -> ShardLayout:
    """Load a shard into ``state``, each block verified just before it is copied; its layout.

    CorruptBlockError leaves tensors of other blocks loaded: nobody may train on that state.
    Small objects are taken only when all blocks were found right.
    Raises LayoutMismatchError naming the tensors that differ, UndecodableError for small
    objects that cannot be read here.
    """
    contents = shard.contents()
    reach("restore.verified")
    whole = _fill(contents, shard, state)
    state.load(decode(contents.objects))
    planned = Planned.of(state, split_bytes)
    if whole is None or not whole.agrees(planned):
        compare(contents.layout, planned.layout())
    reach("restore.done")
    return contents.layout


def read_objects(shard: SealedShard) -> dict[str, Any]:
    """The small objects alone."""
    objects: dict[str, Any] = decode(shard.meta().objects)
    return objects


def compare(stored: ShardLayout, live: ShardLayout) -> None:
    """LayoutMismatchError naming what differs, if anything does."""
    if stored == live:
        return
    differences = layout_differences(stored, live)
    if differences:
        raise LayoutMismatchError(
            f"the state differs from the restored snapshot: {'; '.join(differences)}. Build the "
            "same model, optimizer and parallel layout as in the run that saved it"
        )


def _fill(contents: Contents, shard: SealedShard, state: TrainingState) -> WholeTensors | None:
    """Give every stored tensor its bytes: live ones in place, others through adopt().

    What is returned makes the comparison with the state cheaper afterwards.
    """
    live = live_tensors(state)
    whole = None if contents.whole is None else WholeTensors.of(contents.whole, live)
    if whole is not None and whole.are_plain() and contents.cuts is not None:
        _copy(contents.cuts, whole.addresses, shard)
    else:
        _fill_one_by_one(contents.layout, shard, state, live)
    return whole


def _fill_one_by_one(
    layout: ShardLayout,
    shard: SealedShard,
    state: TrainingState,
    live: dict[str, torch.Tensor],
) -> None:
    """As _fill, of any state: parts of tensors, several names for one, tensors to be made."""
    region = region_tensor(shard.region)
    _check_fits(layout, live, state)
    replicas = state.replicas()
    adopter = state if isinstance(state, AdoptsTensors) else None
    entries = layout.by_name()
    adopted: dict[str, torch.Tensor] = {}
    split: list[SplitTensor] = []
    spans, items = Spans([], [], []), list[CopyItem]()
    filled: list[Filled] = []
    for entry in sorted(layout.entries, key=lambda e: bool(e.alias_of)):
        if entry.alias_of in live:
            if entry.name not in live:
                adopted[entry.name] = _alias_view(entry, entries, live)
            continue
        if entry.alias_of in adopted and entry.name not in live:
            adopted[entry.name] = _alias_view(entry, entries, adopted)
            continue
        group = replicas.get(entry.name)
        if entry.is_split:
            group = group or (adopter.replica_group(entry.name) if adopter else None)
            check_group(entry, group)
        target = live.get(entry.name)
        if target is None:
            target = adopted[entry.name] = _new_tensor(entry, group)
        filled.append(Filled(entry, target))
        if is_plain_memory(target):
            # Bytes as they are: making views of thousands of tensors takes longer.
            start = entry.start * target.element_size() if entry.is_split else 0
            spans.add(target.data_ptr() + start, entry.offset, entry.nbytes)
        else:
            part = live_part(target.detach(), entry)
            items.append(CopyItem(stored_view(region, entry), part))
        if entry.is_split:
            split.append(SplitTensor(entry, target, group))
    _copy(shard.cut(spans.offsets, spans.lengths), spans.targets, shard)
    if items:
        copy_in_threads(items)
    require_all_held(filled, region)
    exchange(split)
    if adopter is not None and adopted:
        adopter.adopt(adopted)


def _copy(cuts: Cuts, targets: list[int], shard: SealedShard) -> None:
    """Verify all blocks of tensors; what of the spans is in one is copied when it is."""
    copying = VerifiedCopy(shard.region, shard.check, cuts, targets)
    half = len(cuts.chunks) // 2
    bad = copying.run(cuts.chunks[:half])
    reach("restore.half")
    shard.require_none(bad + copying.run(cuts.chunks[half:]))


def _check_fits(layout: ShardLayout, live: dict[str, torch.Tensor], state: TrainingState) -> None:
    """Refuse before any byte is written what can be known to differ by then."""
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


def _new_tensor(entry: LayoutEntry, group: Any) -> torch.Tensor:
    device = exchange_device(group) if entry.is_split else torch.device("cpu")
    return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device=device)


def _alias_view(
    entry: LayoutEntry, entries: dict[str, LayoutEntry], filled: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The part of a filled owner's memory that an alias looks at."""
    owner = filled[entry.alias_of].detach()
    if entry.is_split:
        return owner
    start = entry.offset - entries[entry.alias_of].offset
    raw = owner.contiguous().view(-1).view(torch.uint8)[start : start + entry.nbytes]
    return raw.view(dtype_from_name(entry.dtype)).view(entry.shape)
