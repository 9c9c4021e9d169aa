"""What the coordinator has every SMP tell whoever asks for the job's status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ft.coordinator.coordinator import Coordinator


def summary(of: Coordinator) -> bytes:
    """The job as the coordinator sees it, as JSON for ``megatron-ft status``."""
    snapshot = of.committed
    protected, durable = of.protected, of.durable
    view = {
        "incarnation": of.incarnation,
        "nodes": sorted(of.links),
        "encoders": "up" if of.usable_world else "down",
        "paused": of.paused,
        "held": of.pinned,
        "skipped": of.skips.total,
        "drain_failures": of.drain_failures[0],
        "drain_failure": of.drain_failures[1],
        "gated": of.gated,
        "blocks": {
            "bad": of.repairs.found,
            "repaired": of.repairs.repaired,
            "damaged_shards": len(of.repairs.lost),
        },
        "iteration": max(of.progress.values(), default=-1),
        "watch": of.watched,
        "committed": None
        if snapshot is None
        else {"snapshot": str(snapshot[0]), "iteration": snapshot[1], "level": snapshot[2]},
        "protected": None
        if protected is None
        else {"snapshot": str(protected[0]), "iteration": protected[1]},
        "durable": None
        if durable is None
        else {"snapshot": str(durable[0]), "iteration": durable[1]},
    }
    return json.dumps(view).encode()
