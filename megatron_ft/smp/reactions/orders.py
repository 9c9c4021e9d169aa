"""Reactions to the coordinator's orders for one snapshot."""

from __future__ import annotations

from typing import Any

from megatron_ft.arena.format import Permit, SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import PinnedError, TransitionRefusedError
from megatron_ft.smp.node_shards import NodeShards, StorePermit, ToEncoder, ToTrainer
from megatron_ft.smp.reactions.readers import held_back, readers
from megatron_ft.smp.slot_rules import ending
from megatron_ft.smp.slots import begin_rebuild, repairable


def grant(node: NodeShards, message: m.Grant) -> m.Message:
    """Give each shard's trainer a slot for a future iteration, or none of them.

    A permit may come twice, or after its snapshot was decided: over a connection made anew.
    """
    if node.too_late(message.snapshot):
        return _granted_before(node, message.snapshot)
    if held_back(node):
        raise PinnedError(f"snapshots are being read: {', '.join(readers(node))}")
    for slots in node.shards.values():
        if not slots.may_grant(give_up_protected=message.give_up_protected):
            raise TransitionRefusedError(f"{slots.shard_id} has no free slot")
    node.note_newest(message.snapshot)
    for shard_id, slots in node.shards.items():
        index = slots.grant(
            message.snapshot, message.iteration, give_up_protected=message.give_up_protected
        )
        permit = Permit(message.snapshot, message.iteration, index, False)
        node.say(StorePermit(shard_id, permit))
    return m.Ok()


def _granted_before(node: NodeShards, snapshot: SnapshotId) -> m.Message:
    """Ok if the permit still stands, which changes nothing."""
    for slots in node.shards.values():
        index = slots.find(snapshot)
        stands = index is not None and not ending(slots.slots[index])
        if snapshot != node.newest or not (stands or slots.promised(snapshot)):
            raise TransitionRefusedError(f"{slots.shard_id} is past snapshot {snapshot}")
    return m.Ok()


def encode(node: NodeShards, message: m.Encode) -> m.Message:
    """Have parity computed; it is invalid from here on until it is complete.

    An order that comes again changes nothing: parity that is complete must not become invalid.
    """
    node.check_world(message.world)
    local = node.local_members(message.stripes)
    if local and all(node.slots_of(s).encoding_begun(message.snapshot) for s in local):
        return m.Ok()
    for shard_id in local:
        node.slots_of(shard_id).begin_encode(message.snapshot)
    stripes = node.fill_in(message.stripes, message.snapshot)
    if stripes:
        node.say(ToEncoder(m.EncodeOrder(message.snapshot, message.world, stripes)))
    return m.Ok()


def rebuild(node: NodeShards, message: m.Rebuild) -> m.Message:
    """Have lost members solved; those that come here get a slot."""
    node.check_world(message.world)
    for stripe in message.stripes:
        for shard_id in stripe.lost:
            if shard_id in node.shards:
                begin_rebuild(node.shards[shard_id], message.snapshot, message.iteration)
    stripes = node.fill_in(message.stripes, message.snapshot)
    if stripes:
        node.say(ToEncoder(m.RebuildOrder(message.snapshot, message.world, stripes)))
    return m.Ok()


def load(node: NodeShards, message: m.Load) -> m.Message:
    """Give shards that come from disk a slot."""
    for shard_id in message.shards:
        begin_rebuild(node.slots_of(shard_id), message.snapshot, message.iteration)
    return m.Ok()


def repair(node: NodeShards, message: m.Repair) -> m.Message:
    """Have bad blocks of a committed slot solved."""
    node.check_world(message.world)
    for shard_id in node.local_members(message.stripes):
        repairable(node.slots_of(shard_id), message.snapshot)
    stripes = node.fill_in(message.stripes, message.snapshot)
    if stripes:
        order = m.RepairOrder(
            message.snapshot,
            message.world,
            stripes,
            message.shard_id,
            message.data_blocks,
            message.parity_blocks,
        )
        node.say(ToEncoder(order))
    return m.Ok()


def commit(node: NodeShards, message: m.Commit) -> m.Message:
    """The snapshot is complete everywhere: from here on it is what a failure falls back to."""
    node.note_newest(message.snapshot)
    local_only = message.level == "local"
    for slots in node.shards.values():
        slots.commit(message.snapshot, local_only=local_only)
    for shard_id in node.trainers & node.shards.keys():
        node.say(ToTrainer(shard_id, m.Outcome(message.snapshot, "committed")))
    return m.Ok()


def abort(node: NodeShards, message: m.Abort) -> m.Message:
    """The snapshot will never be complete; a slot that is still written is freed later."""
    node.note_newest(message.snapshot)
    for shard_id, slots in node.shards.items():
        _revoke(node, shard_id, message.snapshot)
        if slots.promised(message.snapshot):
            node.tell(m.SlotFreed(shard_id, message.snapshot))
        freed = slots.abort(
            message.snapshot,
            trainer_alive=shard_id in node.trainers,
            encoder_alive=bool(node.world),
        )
        if not freed:
            node.say(ToTrainer(shard_id, m.Outcome(message.snapshot, "aborted")))
    return m.Ok()


def _revoke(node: NodeShards, shard_id: str, snapshot: SnapshotId) -> None:
    """Have the trainer see that its permit is void."""
    slots = node.shards[shard_id]
    index, promise = slots.find(snapshot), slots.promise
    if promise is not None and slots.promised(snapshot):
        node.say(StorePermit(shard_id, Permit(snapshot, promise.iteration, promise.slot, True)))
    elif index is not None and slots.slots[index].state == SlotState.CAPTURING:
        revoked = Permit(snapshot, slots.slots[index].iteration, index, True)
        node.say(StorePermit(shard_id, revoked))


REACTIONS: dict[type[m.Message], Any] = {
    m.Grant: grant,
    m.Encode: encode,
    m.Rebuild: rebuild,
    m.Load: load,
    m.Repair: repair,
    m.Commit: commit,
    m.Abort: abort,
}
