"""What a node's machine knows of its shards, and what its reactions share.

What a node's machine wants done, carried out in the order in which it decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_ft.arena.format import Permit, SlotHeader
from megatron_ft.core.errors import StaleIncarnationError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import TransitionRefusedError, WorldGoneError
from megatron_ft.smp.slots import ShardSlots


@dataclass(frozen=True)
class StoreSlot:
    """Write one slot header into its arena."""

    shard_id: str
    slot: int
    header: SlotHeader


@dataclass(frozen=True)
class StorePermit:
    """Write the permit word that the shard's trainer reads."""

    shard_id: str
    permit: Permit | None


@dataclass(frozen=True)
class ToTrainer:
    """Send a message to the shard's trainer."""

    shard_id: str
    body: m.Message


@dataclass(frozen=True)
class ToEncoder:
    """Send an order to the node's encoder."""

    body: m.Message


@dataclass(frozen=True)
class ToCoordinator:
    """Send an event to the coordinator."""

    body: Any


@dataclass(frozen=True)
class MendSlot:
    """Prove recomputed blocks of a committed slot, write them, and tell the coordinator.

    ``header`` is the slot's header when this was decided; effects are carried out in order,
    so the slot is given to nobody before.
    """

    shard_id: str
    slot: int
    header: SlotHeader
    blocks: m.Recomputed


Effect = MendSlot | StoreSlot | StorePermit | ToTrainer | ToEncoder | ToCoordinator


class NodeShards:
    """Shards, writers and waiting effects of one SMP.

    ``trainers`` are shards whose registered trainer is alive, ``world`` the world of
    the node's live encoder ("" if none).  ``paths`` gives each shard's arena path, ``newest`` is
    the newest snapshot that was permitted or decided here.
    """

    def __init__(self, node: str, highest_incarnation: int = 0) -> None:
        self.node = node
        self.highest_incarnation = highest_incarnation
        self.shards: dict[str, ShardSlots] = {}
        self.paths: dict[str, str] = {}
        self.trainers: set[str] = set()
        self.world = ""
        self.newest: SnapshotId | None = None
        self.effects: list[Effect] = []
        self._said: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Effects since the last call, in the order in which they must happen."""
        taken, self.effects = self.effects, []
        return taken

    def say(self, *effects: Effect) -> None:
        """Have these happen once the slot changes of this reaction are stored."""
        self._said += effects

    def tell(self, body: Any) -> None:
        """``say`` that the coordinator is to hear ``body``."""
        self.say(ToCoordinator(body))

    def slots_of(self, shard_id: str) -> ShardSlots:
        """The shard's slots; TransitionRefusedError if it is not on this node."""
        if shard_id not in self.shards:
            raise TransitionRefusedError(f"shard {shard_id} is not on this node")
        return self.shards[shard_id]

    def check_incarnation(self, message: m.Message) -> None:
        """Nobody of an older incarnation, nor of one not admitted here, moves any state."""
        incarnation = getattr(message, "incarnation", self.highest_incarnation)
        if incarnation != self.highest_incarnation:
            raise StaleIncarnationError(
                f"{type(message).__name__} of incarnation {incarnation} after "
                f"{self.highest_incarnation} was admitted"
            )

    def note_newest(self, snapshot: SnapshotId) -> None:
        """No older snapshot is permitted from here on, nor this one again."""
        self.newest = snapshot if self.newest is None else max(self.newest, snapshot)

    def too_late(self, snapshot: SnapshotId) -> bool:
        """Whether a permit was overtaken: it has been given, or decided upon, before."""
        return self.newest is not None and snapshot <= self.newest

    def check_world(self, world: str) -> None:
        """An encoder of a world that has been replaced must not move any state."""
        if world != self.world:
            raise WorldGoneError(f"encoder world {world} is gone; now {self.world or '-'}")

    def local_members(self, stripes: tuple[m.StripeOrder, ...]) -> list[str]:
        """Members of these stripes that are on this node."""
        return [s for stripe in stripes for s in stripe.members if s in self.shards]

    def fill_in(
        self, stripes: tuple[m.StripeOrder, ...], snapshot: SnapshotId
    ) -> tuple[m.StripeOrder, ...]:
        """The order as this node's encoder needs it: with local arenas and slots."""
        filled = []
        for stripe in stripes:
            local = self.local_members((stripe,))
            if not local:
                continue
            slots = {s: self._holding(s, snapshot) for s in local}
            arenas = {s: self.paths[s] for s in local}
            filled.append(msgspec.structs.replace(stripe, arenas=arenas, slots=slots))
        return tuple(filled)

    def _holding(self, shard_id: str, snapshot: SnapshotId) -> int:
        slot = self.shards[shard_id].find(snapshot)
        if slot is None:
            raise TransitionRefusedError(f"{shard_id} has no slot with snapshot {snapshot}")
        return slot

    def _collect_changes(self) -> None:
        """Slot changes first, then whatever tells others about them.

        Both go behind the effects of earlier messages that are still to be carried out:
        an older header must never be stored over a newer one.
        """
        for shard_id, slots in self.shards.items():
            for slot, header in slots.take_changes():
                self.effects.append(StoreSlot(shard_id, slot, header))
        self.effects += self._said
        self._said = []
