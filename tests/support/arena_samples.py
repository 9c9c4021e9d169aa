"""Small arenas and records for the arena tests."""

from __future__ import annotations

import uuid
from typing import Any

from megatron_ft.arena.format import ArenaHeader, Geometry, SlotHeader, SlotState
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId

JOB = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
SHARD = "pp0-tp1-dp3-ep0"
MEMBERS = ("pp0-tp1-dp2-ep0", SHARD, "pp0-tp1-dp4-ep0")


def make_header(**changes: Any) -> ArenaHeader:
    values: dict[str, Any] = {
        "job": JOB,
        "shard_id": SHARD,
        "incarnation": 7,
        "lineage": (Ancestor(5, None), Ancestor(7, SnapshotId(5, 90))),
        "codec": "rs",
        "data_members": 2,
        "parity_members": 1,
        "member_index": 1,
        "members": MEMBERS,
        "geometry": Geometry(2, 12288, 6144, 1024),
    }
    return ArenaHeader(**(values | changes))


def make_record(**changes: Any) -> SealedRecord:
    values: dict[str, Any] = {
        "shard_id": SHARD,
        "snapshot": SnapshotId(7, 91),
        "iteration": 1234,
        "tensor_bytes": 1000,
        "meta_offset": 1024,
        "meta_bytes": 50,
        "digest_offset": 1088,
        "used_bytes": 1104,
        "layout_hash": bytes(range(32)),
        "digest_root": bytes(range(32, 64)),
    }
    return SealedRecord(**(values | changes))


def make_slot(**changes: Any) -> SlotHeader:
    values: dict[str, Any] = {
        "state": SlotState.PROTECTED,
        "snapshot": SnapshotId(7, 91),
        "iteration": 1234,
        "local_only": False,
        "record": make_record(),
        "parity_valid": True,
        "parity_root": bytes(range(64, 96)),
        "stripe_table": tuple(make_record(shard_id=member) for member in MEMBERS),
    }
    return SlotHeader(**(values | changes))
