"""Loading a shard: verified and copied in place, then checked against what was stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import BlockCheck
from megatron_ft.capture.binding import region_tensor, stored_view
from megatron_ft.capture.columns import WholeTensors
from megatron_ft.capture.copier import CopyItem
from megatron_ft.capture.cpu import is_plain_memory
from megatron_ft.capture.exchange import SplitTensor, check_group, exchange, exchange_device
from megatron_ft.capture.fill import (
    Copies,
    Spans,
    VerifiedCopy,
    chunk_blocks,
    chunks_of,
    copy_in_threads,
)
from megatron_ft.capture.plan import Planned, dtype_from_name, dtype_name
from megatron_ft.capture.state import AdoptsTensors, TrainingState, live_tensors
from megatron_ft.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.fault_points import reach
from megatron_ft.identity import SealedRecord
from megatron_ft.objects import decode
from megatron_ft.shard import LayoutEntry, ShardLayout, layout_differences
from megatron_ft.shard_meta import Meta, unpack_meta

Report = Callable[[int], None]


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
        self.first_meta = digest.first_meta_block(record, self.block_bytes)
        self._report = report
        self._name = f"shard {record.shard_id}, snapshot {record.snapshot}, slot {slot} of"
        self._name += f" {arena.path}"

    def meta(self) -> Meta:
        """The layout and the small objects, their digests compared; tensors are not read."""
        self.require_none(self.check.bad(self.first_meta, self.check.blocks))
        return unpack_meta(digest.read_meta(self.region, self.record))

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


def restore_shard(shard: SealedShard, state: TrainingState, split_bytes: int) -> ShardLayout:
    """Load a shard into ``state``, each block verified just before it is copied; its layout.

    CorruptBlockError leaves tensors of other blocks loaded: nobody may train on that state.
    Small objects are taken only when all blocks were found right.
    Raises LayoutMismatchError naming the tensors that differ, UndecodableError for small
    objects that cannot be read here.
    """
    meta = shard.meta()
    reach("restore.verified")
    layout = ShardLayout.from_bytes(meta.layout)
    whole = _fill(layout, shard, state)
    state.load(decode(meta.objects))
    planned = Planned.of(state, split_bytes)
    if whole is None or not whole.agrees(layout, planned):
        compare(layout, planned.layout())
    reach("restore.done")
    return layout


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


def _fill(layout: ShardLayout, shard: SealedShard, state: TrainingState) -> WholeTensors | None:
    """Give every stored tensor its bytes: live ones in place, others through adopt().

    What is returned makes the comparison with the state cheaper afterwards.
    """
    live = live_tensors(state)
    whole = WholeTensors.of(layout, live)
    spans = None if whole is None else whole.spans()
    if spans is None:
        _fill_one_by_one(layout, shard, state, live)
    else:
        _copy(Copies(spans, []), shard)
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
    copies = Copies(Spans([], [], []), [])
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
        _add_copy(copies, target, region, entry)
        if entry.is_split:
            split.append(SplitTensor(entry, target, group))
    _copy(copies, shard)
    exchange(split)
    if adopter is not None and adopted:
        adopter.adopt(adopted)


def _copy(copies: Copies, shard: SealedShard) -> None:
    """Verify all blocks; copy plain bytes out of each when it is, and the rest after all are."""
    chunks = chunks_of(copies.spans, shard.check.blocks, shard.block_bytes)
    half, copying = len(chunks) // 2, VerifiedCopy(shard.region, shard.check, shard.first_meta)
    bad = copying.run(chunks[:half])
    reach("restore.half")
    shard.require_none(bad + copying.run(chunks[half:]))
    if copies.items:
        copy_in_threads(copies.items)


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
    if wrong:
        raise LayoutMismatchError(
            f"{len(wrong)} tensors do not fit the snapshot: {'; '.join(wrong[:8])}. "
            "Build the same model and optimizer as in the run that saved it"
        )


def _new_tensor(entry: LayoutEntry, group: Any) -> torch.Tensor:
    device = exchange_device(group) if entry.is_split else torch.device("cpu")
    return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device=device)


def _add_copy(
    copies: Copies, target: torch.Tensor, region: torch.Tensor, entry: LayoutEntry
) -> None:
    """Bytes as they are where that will do: making views of thousands of tensors takes longer."""
    if is_plain_memory(target):
        start = entry.start * target.element_size() if entry.is_split else 0
        copies.spans.add(target.data_ptr() + start, entry.offset, entry.nbytes)
    else:
        copies.items.append(CopyItem(stored_view(region, entry), target.detach()))


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
