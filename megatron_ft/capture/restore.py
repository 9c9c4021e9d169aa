"""Loading a shard: verified first, then in place, then checked against what was stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.capture.binding import region_tensor, stored_view
from megatron_ft.capture.copier import CopyItem
from megatron_ft.capture.cpu import is_plain_memory
from megatron_ft.capture.exchange import SplitTensor, check_group, exchange, exchange_device
from megatron_ft.capture.fill import Copies, Span, copy_in_threads
from megatron_ft.capture.plan import dtype_from_name, dtype_name, plan_state
from megatron_ft.capture.state import AdoptsTensors, TrainingState, live_tensors
from megatron_ft.capture.threads import spare_threads
from megatron_ft.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.fault_points import reach
from megatron_ft.identity import SealedRecord
from megatron_ft.objects import decode
from megatron_ft.shard import LayoutEntry, ShardLayout, layout_differences
from megatron_ft.shard_meta import Meta, unpack_meta


def verify(
    arena: Arena,
    slot: int,
    record: SealedRecord,
    report: Callable[[int], None],
    *,
    objects_only: bool = False,
) -> None:
    """CorruptBlockError, naming blocks, unless every sealed byte is as it was sealed.

    ``report`` is told the number of bad blocks first.  With ``objects_only`` tensors are left
    out: ``read_objects`` needs no more.
    """
    header = arena.header
    block_bytes = header.geometry.block_bytes
    place = (arena.data(slot), record, block_bytes, header.digest_algorithm)
    if objects_only:
        bad = digest.verify_meta(*place)
    else:
        bad = digest.verify_shard(*place, threads=spare_threads())
    if bad:
        report(len(bad))
        raise CorruptBlockError(
            f"shard {record.shard_id}, snapshot {record.snapshot}, slot {slot} of {arena.path}: "
            f"{len(bad)} of its blocks of {block_bytes} bytes do not match their digests "
            f"({digest.name_blocks(bad)}); nothing was loaded, rebuild the shard from its stripe"
        )


def restore_shard(
    arena: Arena, slot: int, record: SealedRecord, state: TrainingState, split_bytes: int
) -> ShardLayout:
    """Load one verified slot into ``state`` and return its layout.

    Raises LayoutMismatchError naming the tensors that differ, UndecodableError for small
    objects that cannot be read here.
    """
    reach("restore.verified")
    meta = _read_meta(arena, slot, record)
    layout = ShardLayout.from_bytes(meta.layout)
    _fill(layout, region_tensor(arena.data(slot)), state)
    state.load(decode(meta.objects))
    compare(layout, plan_state(state, split_bytes))
    reach("restore.done")
    return layout


def read_objects(arena: Arena, slot: int, record: SealedRecord) -> dict[str, Any]:
    """The small objects of a verified slot."""
    objects: dict[str, Any] = decode(_read_meta(arena, slot, record).objects)
    return objects


def _read_meta(arena: Arena, slot: int, record: SealedRecord) -> Meta:
    return unpack_meta(digest.read_meta(arena.data(slot), record))


def compare(stored: ShardLayout, live: ShardLayout) -> None:
    """LayoutMismatchError naming what differs, if anything does."""
    if stored.hash() == live.hash():
        return
    differences = layout_differences(stored, live)
    if differences:
        raise LayoutMismatchError(
            f"the state differs from the restored snapshot: {'; '.join(differences)}. Build the "
            "same model, optimizer and parallel layout as in the run that saved it"
        )


def _fill(layout: ShardLayout, region: torch.Tensor, state: TrainingState) -> None:
    """Give every stored tensor its bytes: live ones in place, others through adopt()."""
    live = live_tensors(state)
    _check_fits(layout, live, state)
    replicas = state.replicas()
    adopter = state if isinstance(state, AdoptsTensors) else None
    entries = layout.by_name()
    adopted: dict[str, torch.Tensor] = {}
    split: list[SplitTensor] = []
    copies = Copies([], [])
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
    for number, half in enumerate(copies.halves()):
        if number:
            reach("restore.half")
        copy_in_threads(half)
    exchange(split)
    if adopter is not None and adopted:
        adopter.adopt(adopted)


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
    if target.nbytes == entry.nbytes and is_plain_memory(target):
        source = region.data_ptr() + entry.offset
        copies.spans.append(Span(target.data_ptr(), source, entry.nbytes))
        return
    whole = target.detach()
    part = whole.view(-1)[entry.start : entry.stop] if entry.is_split else whole
    copies.items.append(CopyItem(stored_view(region, entry), part))


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
