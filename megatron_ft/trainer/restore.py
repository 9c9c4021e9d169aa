"""Loading a shard: verified and copied in place, then checked against what was stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import BlockCheck
from megatron_ft.core.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.objects import decode
from megatron_ft.core.shard import LayoutEntry, Meta, ShardLayout, unpack_meta
from megatron_ft.trainer import bounce
from megatron_ft.trainer.addresses import has_lazy_sign
from megatron_ft.trainer.binding import live_part, region_tensor, stored_view
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.cpu import is_plain_memory
from megatron_ft.trainer.fill import BlockRanges, VerifiedCopy, chunk_blocks, copy_in_threads
from megatron_ft.trainer.identity_check import (
    Filled,
    PlainLayout,
    require_all_held,
    require_fit,
    require_same_layout,
    without_replaced,
)
from megatron_ft.trainer.plan import (
    SplitTensor,
    check_group,
    check_kinds,
    dtype_from_name,
    exchange,
    exchange_device,
    plan_state,
)
from megatron_ft.trainer.state import (
    AdoptsTensors,
    KnowsMemory,
    TrainingState,
    TrainsInPlace,
    live_tensors,
    require_reshapes,
)

Report = Callable[[int], None]
CopyPlace = tuple[LayoutEntry, torch.Tensor]


class SealedShard:
    """One sealed slot of an arena, about to be read: nothing of it is used unverified.

    ``report`` gets the number of bad blocks before CorruptBlockError names them.
    """

    def __init__(
        self, arena: Arena, slot: int, record: SealedRecord, report: Report, threads: int = 0
    ) -> None:
        """Nothing is read yet but the arena's header and the digest table.

        So many ``threads`` verify and copy; 0: by the machine.
        """
        self.threads = threads
        header = arena.header
        self.region, self.record = arena.data(slot), record
        self.block_bytes = header.geometry.block_bytes
        self.check = BlockCheck(
            self.region, record, self.block_bytes, run=chunk_blocks(self.block_bytes)
        )
        self._report = report
        self._name = f"shard {record.shard_id}, snapshot {record.snapshot}, slot {slot} of"
        self._name += f" {arena.path}"

    def contents(self) -> tuple[ShardLayout, Meta]:
        """The layout and what else is small, the digests compared; tensors are not read.

        CorruptBlockError, and LayoutMismatchError if they were written by another release.
        """
        meta = self.meta()
        layout = ShardLayout.from_bytes(meta.layout)
        if layout.tensor_bytes != self.record.tensor_bytes:
            raise LayoutMismatchError(
                f"{self._name}: the stored layout is of {layout.tensor_bytes} bytes of tensors and "
                f"its record of {self.record.tensor_bytes}; restore another snapshot"
            )
        return layout, meta

    def meta(self) -> Meta:
        """As contents, not decoded."""
        first = digest.first_meta_block(self.record, self.block_bytes)
        self.require_none(self.check.bad(first, self.check.blocks))
        return unpack_meta(digest.read_meta(self.region, self.record))

    def cut(self, offsets: list[int], lengths: list[int]) -> BlockRanges:
        """Spans of tensors, cut for VerifiedCopy, which checks all blocks that hold tensors.

        So a block that holds both tensors and small objects is verified for each of them.
        """
        blocks = digest.table_entries(self.record.tensor_bytes, self.block_bytes)
        return BlockRanges.of(offsets, lengths, blocks, self.block_bytes)

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


def restore_shard(shard: SealedShard, state: TrainingState) -> ShardLayout:
    """Load a shard into ``state``, each block verified just before it is copied; its layout.

    CorruptBlockError leaves tensors of other blocks loaded: that state must not be trained on.
    Small objects are taken only when all blocks were found right.
    Raises LayoutMismatchError naming the tensors that differ, UndecodableError for small
    objects that cannot be read here.
    """
    layout, meta = shard.contents()
    reach("restore.verified")
    plain, live = PlainLayout.of(layout), live_tensors(state)
    check_kinds(live)
    table = None if plain is None else plain.table(live)
    if plain is not None and table is not None:
        addresses: list[int] = table.facts[0]
        _copy(shard.cut(plain.offsets, plain.lengths), addresses, shard)
    else:
        _fill_one_by_one(layout, shard, state, without_replaced(layout, live, state))
    state.load(_objects_for(meta, shard.record.shard_id, state))
    now = live_tensors(state)
    if isinstance(state, TrainsInPlace) and (lost := state.overwritten()):
        _fill_one_by_one(_part_of(layout, lost), shard, state, now)
    if table is None or not table.still(now):
        require_same_layout(layout, plan_state(state, like=layout))
    if isinstance(state, KnowsMemory):
        state.require_covered()
    reach("restore.done")
    return layout


def read_objects(shard: SealedShard) -> dict[str, Any]:
    """The small objects alone; of a shard that was reshaped, those of its nearest origin."""
    objects: dict[str, Any] = decode(shard.meta().nearest_objects)
    return objects


def _objects_for(meta: Meta, shard_id: str, state: TrainingState) -> dict[str, Any]:
    """The argument of ``state.load``; of a reshaped shard, made of its origins' objects."""
    if not meta.origins:
        objects: dict[str, Any] = decode(meta.objects)
        return objects
    origins = [(name, decode(raw)) for name, raw in meta.origins.items()]
    return require_reshapes(state).reshape_objects(shard_id, origins)


def _fill_one_by_one(
    layout: ShardLayout,
    shard: SealedShard,
    state: TrainingState,
    live: Mapping[str, torch.Tensor],
) -> None:
    """Give every stored tensor its bytes: live ones in place, others through adopt().

    Of any state: parts of tensors, several names for one, tensors to be made.
    """
    region = region_tensor(shard.region)
    require_fit(layout, live, state)
    replicas = state.replicas()
    adopter = state if isinstance(state, AdoptsTensors) else None
    entries = layout.by_name()
    adopted: dict[str, torch.Tensor] = {}
    split: list[SplitTensor] = []
    targets, offsets, lengths = list[int](), list[int](), list[int]()
    items = list[CopyItem]()
    plain, on_device = list[CopyPlace](), list[CopyPlace]()
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
            targets.append(target.data_ptr() + start)
            offsets.append(entry.offset)
            lengths.append(entry.nbytes)
            plain.append((entry, target))
        elif _is_plain_on(target, on_device):
            on_device.append((entry, target))
        else:
            part = live_part(target.detach(), entry)
            items.append(CopyItem(stored_view(region, entry), part))
        if entry.is_split:
            split.append(SplitTensor(entry, target, group))
    if on_device:
        _bounce([*on_device, *plain], shard)
    else:
        _copy(shard.cut(offsets, lengths), targets, shard)
    if items:
        copy_in_threads(items, shard.threads)
    require_all_held(filled, region)
    exchange(split)
    if adopter is not None and adopted:
        adopter.adopt(adopted)


def _part_of(layout: ShardLayout, names: Collection[str]) -> ShardLayout:
    """The entries of these names, and those whose memory they share."""
    shared = {entry.alias_of for entry in layout.entries if entry.name in names}
    entries = (entry for entry in layout.entries if entry.name in names or entry.name in shared)
    return msgspec.structs.replace(layout, entries=tuple(entries))


def _copy(cuts: BlockRanges, targets: list[int], shard: SealedShard) -> None:
    """Verify all blocks of tensors; what of the spans is in one is copied when it is."""
    copying = VerifiedCopy(shard.region, shard.check, cuts, targets)
    shard.require_none(copying.run(shard.threads))


def _is_plain_on(tensor: torch.Tensor, others: list[CopyPlace]) -> bool:
    """True if its bytes are its values, in order, on a device, the one that has the others."""
    if not tensor.is_cuda or not tensor.is_contiguous() or has_lazy_sign(tensor):
        return False
    return not others or others[0][1].get_device() == tensor.get_device()


def _bounce(places: list[CopyPlace], shard: SealedShard) -> None:
    """Verify all blocks of tensors, and copy them; the first place is on the device."""
    offsets = [entry.offset for entry, _ in places]
    parts = [bounce.flat_bytes(live_part(target.detach(), entry)) for entry, target in places]
    cuts = bounce.cut_for_buffers(offsets, parts, shard.record.tensor_bytes, shard.block_bytes)
    stream = bounce.DeviceStream(places[0][1].get_device())
    shard.require_none(bounce.BouncedCopy(shard.check, cuts, parts, stream).run(shard.threads))


def _new_tensor(entry: LayoutEntry, group: Any) -> torch.Tensor:
    device = exchange_device(group) if entry.is_split else torch.device("cpu")
    return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device=device)


def _alias_view(
    entry: LayoutEntry, entries: dict[str, LayoutEntry], filled: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The part of a filled owner's memory that an alias shows."""
    owner = filled[entry.alias_of].detach()
    if entry.is_split:
        return owner
    start = entry.offset - entries[entry.alias_of].offset
    raw = owner.contiguous().view(-1).view(torch.uint8)[start : start + entry.nbytes]
    return raw.view(dtype_from_name(entry.dtype)).view(entry.shape)
