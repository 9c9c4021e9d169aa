"""A heartbeat brings a node what it does not know of the job yet, and nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from smp_node import SECRET, SmpNode, run

from megatron_ft.capture.binding import layout_changed
from megatron_ft.cli import status
from megatron_ft.coordinator.actions import Ended
from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.events import Observers
from megatron_ft.coordinator.link import SmpLink
from megatron_ft.coordinator.recovery import admit
from megatron_ft.coordinator.summary import SummaryParts, summary
from megatron_ft.coordinator.timing import Timing
from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m
from megatron_ft.smp.job_summary import digests, merged
from megatron_ft.smp.local_query import ask
from megatron_ft.smp.security import JobKeys


class Leases(SmpLink):
    """A link that keeps the heartbeats that it has sent."""

    seen: list[m.Lease] = []  # noqa: RUF012

    async def ask(self, request: m.Message, timeout: float) -> Any:
        if isinstance(request, m.Lease):
            self.seen.append(request)
        return await super().ask(request, timeout)


def coordinator(heartbeat: float = 0.5) -> Coordinator:
    made = Coordinator(
        JobKeys.derive(SECRET), Observers(), lambda world: None, Timing(heartbeat=heartbeat)
    )
    made.link_type = Leases
    return made


def test_what_a_node_knows_is_not_sent_again() -> None:
    of = coordinator()
    of.links = dict.fromkeys((f"node{i:04d}" for i in range(2048)), None)  # type: ignore[arg-type]
    parts = SummaryParts(of, 0.0)
    held = parts.unknown_to({})
    assert json.loads(merged(held)) == json.loads(summary(of))
    assert parts.unknown_to(digests(held)) == {}
    of.progress["dp0"] = 7
    news = parts.unknown_to(digests(held))
    assert news == {"progress": b'{"iteration": 7}'}
    assert len(m.encode(m.Lease(1, 10.0, 1.0, news))) < 150
    of.links.pop("node0007")
    assert list(parts.unknown_to(digests(held | news))) == ["nodes"]


def test_it_is_made_once_for_all_nodes_of_a_round() -> None:
    of = coordinator()
    parts = SummaryParts(of, 3600.0)
    held = digests(parts.unknown_to({}))
    of.progress["dp0"] = 7
    assert parts.unknown_to(held) == {}


async def until_quiet(of: Coordinator) -> None:
    """Until a heartbeat has nothing to tell."""
    await of.refresh()
    while Leases.seen[-1].summary:
        await of.refresh()


def test_an_smp_tells_what_it_has_and_shows_it(tmp_path: Path) -> None:
    node = SmpNode(tmp_path)

    async def story() -> None:
        node.start()
        endpoint = await node.endpoint()
        of = coordinator(heartbeat=0.02)
        of.connect("node0", endpoint)
        await admit(of, 1, ["node0"])
        await until_quiet(of)
        assert any(lease.summary for lease in Leases.seen)
        status = await asyncio.to_thread(ask, node.environment.socket, m.StatusRequest())
        assert json.loads(status.summary) == json.loads(summary(of))
        of.connect("node0", endpoint)  # as after the SMP was replaced: nothing is known of it
        first = len(Leases.seen)
        await until_quiet(of)
        assert Leases.seen[first].summary
        await of.close()

    try:
        run(story())
    finally:
        node.kill()


def test_status_shows_why_no_snapshot_succeeds_until_one_does() -> None:
    """As where a layout has changed in mid-run: each one is given up for the same reason."""
    of, cause = coordinator(), layout_changed("moment is new")

    def shown() -> str:
        job = {"summary": json.loads(summary(of)), "nodes": {}, "supervised": True}
        return status.render("job", job)

    for sequence in (1, 2, 3):
        assert ("given up" in shown()) == (sequence > 2)
        of._ended(Ended(SnapshotId(1, sequence), sequence, "aborted", f"dp0: {cause}"))
    assert f"the last 3 snapshots were given up: dp0: {cause}" in shown()
    of._ended(Ended(SnapshotId(1, 4), 4, "aborted", "training ends", last=True))
    of._ended(Ended(SnapshotId(1, 5), 5, "aborted", "its loss", gated=True))
    assert "the last 3 snapshots were given up" in shown(), "these have causes of their own"
    of._ended(Ended(SnapshotId(1, 6), 6, "local"))
    assert "given up" not in shown()
