"""What the coordinator has every SMP tell whoever asks for the job's status.

It is in parts, by how often they change, and a heartbeat brings a node those that it does
not have: an iteration's number nearly always, the names of all nodes when one was replaced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ft.rpc.job_messages import merged_summary, summary_digest

if TYPE_CHECKING:
    from megatron_ft.supervisor.coordinator import Coordinator


class SummaryParts:
    """The parts of a job's summary, made anew at most every ``seconds``.

    What they cost grows with the job, and each of its nodes has a heartbeat of its own.
    """

    def __init__(self, of: Coordinator, seconds: float) -> None:
        self._of, self._seconds = of, seconds
        self._until = 0.0
        self._parts: dict[str, tuple[bytes, bytes]] = {}

    def unknown_to(self, held: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those parts that a node lacks; ``held`` are the digests of those that it has."""
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + self._seconds
            self._parts = {
                name: (summary_digest(part), part) for name, part in _parts(self._of).items()
            }
        return {k: part for k, (known, part) in self._parts.items() if held.get(k) != known}


def summary(of: Coordinator) -> bytes:
    """The job as the coordinator sees it, as JSON for ``megatron-ft status``."""
    return merged_summary(_parts(of))


def _parts(of: Coordinator) -> dict[str, bytes]:
    views = {
        "state": _state(of),
        "nodes": {"nodes": sorted(of.links)},
        "progress": {"iteration": max(of.progress.values(), default=-1)},
    }
    return {name: json.dumps(view).encode() for name, view in views.items()}


def _state(of: Coordinator) -> dict[str, Any]:
    snapshot = of.committed
    protected, durable = of.protected, of.durable
    crash, node_loss = of.fallbacks()
    return {
        "incarnation": of.incarnation,
        "resumed_from": of.resumed_from,
        "encoders": "up" if of.usable_world else "down",
        "paused": of.paused,
        "held": of.pinned,
        "skipping_for": "a reader" if of.pinned else "want of encoders" if of.crowded else "",
        "skipped": of.skips.total + of.skips.now,
        "drain_failures": of.drain_failures[0],
        "drain_failure": of.drain_failures[1],
        "given_up": of.given_up[0],
        "given_up_reason": of.given_up[1],
        "blocks": {
            "bad": of.repairs.found,
            "repaired": of.repairs.repaired,
            "damaged_shards": len(of.repairs.lost),
        },
        "watch": of.watched,
        "committed": None
        if snapshot is None
        else {"snapshot": str(snapshot[0]), "iteration": snapshot[1], "level": snapshot[2]},
        "protected": None
        if protected is None
        else {"snapshot": str(protected[0]), "iteration": protected[1]},
        "crash": None if crash is None else crash.iteration,
        "node_loss": None if node_loss is None else node_loss.iteration,
        "durable": None
        if durable is None
        else {"snapshot": str(durable[0]), "iteration": durable[1]},
    }
