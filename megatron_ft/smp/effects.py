"""Effects of an SMP's decisions: headers to write, and messages to send.  No input or output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.arena.format import Permit, SlotHeader
from megatron_ft.rpc import messages as m


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


Effect = StoreSlot | StorePermit | ToTrainer | ToEncoder | ToCoordinator
