"""A heartbeat brings a node what it does not know of the job yet, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.cli import status
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.job_messages import merged_summary, summary_digests
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.smp.slot_rules import MOST_SKIPPED
from megatron_ft.supervisor.admission import admit
from megatron_ft.supervisor.connections import SmpLink
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.cycle import Action, CyclePhase, Send, SnapshotCycle, SnapshotEnded
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.exposure import Exposure, StripeMap
from megatron_ft.supervisor.orders import Timing, stripe_orders
from megatron_ft.supervisor.schedule import Schedule
from megatron_ft.supervisor.summary import SummaryParts
from megatron_ft.trainer.binding import layout_changed
from tests.support.smp_node import SECRET, SmpNode, run


class Leases(SmpLink):
    """A link that keeps the heartbeats that it has sent."""

    seen: list[m.Lease] = []  # noqa: RUF012

    async def ask(self, request: m.Message, timeout: float) -> Any:
        if isinstance(request, m.Lease):
            self.seen.append(request)
        return await super().ask(request, timeout)


def coordinator(heartbeat: float = 0.5) -> Coordinator:
    lease = max(10.0, 5 * heartbeat)
    timing = Timing(heartbeat=heartbeat, lease=lease, node_timeout=1.5 * lease)
    made = Coordinator(JobKeys.derive(SECRET), Observers(), lambda world: None, timing)
    made.link_type = Leases
    return made


def summary(of: Coordinator) -> dict[str, Any]:
    """All parts as one."""
    return {name: value for part in of.view().values() for name, value in part.items()}


def test_what_a_node_knows_is_not_sent_again() -> None:
    of = coordinator()
    of.links = dict.fromkeys((f"node{i:04d}" for i in range(2048)), None)  # type: ignore[arg-type]
    parts = SummaryParts(of.view, 0.0)
    held = parts.unknown_to({})
    assert json.loads(merged_summary(held)) == {**summary(of), m.MADE: 1}
    assert parts.unknown_to(summary_digests(held)) == {}
    of.progress["dp0"] = 7
    parts._until = 0.0
    news = parts.unknown_to(summary_digests(held))
    assert news == {"progress": b'{"iteration": 7}', m.MADE: b'{"made": 2}'}
    assert len(m.encode(m.Lease(1, 10.0, 1.0, news))) < 150
    of.links.pop("node0007")
    parts._until = 0.0
    assert list(parts.unknown_to(summary_digests(held | news))) == ["nodes", m.MADE]


def test_it_is_made_once_for_all_nodes_of_a_round() -> None:
    of = coordinator()
    parts = SummaryParts(of.view, 3600.0)
    held = summary_digests(parts.unknown_to({}))
    of.progress["dp0"] = 7
    assert parts.unknown_to(held) == {}


def test_what_costs_much_is_made_less_often() -> None:
    made: list[float] = []

    def view() -> dict[str, Any]:
        made.append(time.monotonic())
        time.sleep(0.02)
        return {}

    parts = SummaryParts(view, 0.01)
    while len(made) < 2:
        parts.unknown_to({})
    assert made[1] - made[0] >= 20 * 0.02


PLACES = {"dp0": "n0", "dp1": "n1"}
OLD, NEW = SnapshotId(1, 1), SnapshotId(1, 2)
STRIPES = stripe_orders(
    [StripeState("replica", 1, 1, 128, tuple(PLACES), 64)], PLACES, sorted(PLACES.values())
)


def training(of: Coordinator, **held: tuple[m.HeldSnapshot, ...]) -> Coordinator:
    """In the middle of training, with what each node has said to hold."""
    of.cycle = SnapshotCycle(1, PLACES, STRIPES, Schedule(10))
    of.show("nodes", lambda: {"spares": []})
    of.show("state", lambda: {"watch": {}, "drain_failures": 0, "drain_failure": ""})
    of.standing.held = dict(held)
    of.standing.commits(OLD, 10, "protected")
    of.standing.commits(NEW, 20, "local")
    return of


def headline(of: Coordinator) -> str:
    job = {"summary": summary(of), "nodes": {}, "supervised": True}
    return status.render("job", job).splitlines()[0]


def test_the_headline_says_what_each_failure_falls_back_to_now() -> None:
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(coordinator(), n0=(new, old), n1=(new, old))
    assert "iteration 20 survives a crash, iteration 10 a node loss" in headline(of)
    of.standing.damage.lost.add(("dp0", OLD))
    assert "20 survives a crash, nothing in memory survives a node loss (1 sh" in headline(of)
    of.standing.held["n0"] = (new,)
    of.standing.damage.lost.clear()
    assert "20 survives a crash, nothing in memory survives a node loss" in headline(of)
    of.standing.damage.lost.add(("dp1", NEW))
    assert "iteration 10 survives a crash, nothing in memory" in headline(of), "n1 has its parity"
    of.standing.held["n1"] = (new,)
    assert "nothing in memory survives a crash" in headline(of)


def test_parity_makes_up_for_a_damaged_shard_or_for_a_lost_node() -> None:
    new = m.HeldSnapshot(NEW, 20, True)
    held = {"n0": (new,), "n1": (new,)}
    layout = StripeMap(PLACES, STRIPES)
    assert Exposure(layout, held).memory() == (new, new)
    assert Exposure(layout, held, {("dp0", NEW)}).memory() == (new, None)
    assert Exposure(StripeMap(PLACES, ()), held).memory() == (new, None)
    both = {("dp0", NEW), ("dp1", NEW)}
    assert Exposure(layout, held, both).memory() == (None, None)
    assert Exposure(layout, {"n0": (new,)}).memory() == (new, None), "n1 has it no more"


def test_a_pause_that_comes_with_a_heartbeat_stops_the_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> CyclePhase:
        of = coordinator()
        cycle = SnapshotCycle(1, PLACES, STRIPES, Schedule(10))
        looked = asyncio.Event()

        async def refresh() -> None:
            of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
            of._paused_on = {"n0"}
            looked.set()

        monkeypatch.setattr(of, "refresh", refresh)
        of.start_snapshots(cycle)
        await asyncio.wait_for(looked.wait(), 30)
        phase = cycle.phase
        of.links.clear()
        await of.close()
        return phase

    assert run(story()) == CyclePhase.IDLE


def full(of: Coordinator, *, skipped: int, away: float) -> list[Action]:
    """What is permitted beside a protected snapshot and a newer local one, without encoders."""
    of._crowded_on = {"n0"}
    of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    of._world_seen = time.monotonic() - away
    assert of.cycle is not None
    of.progress = dict.fromkeys(PLACES, 20)
    assert of._next(of.cycle) == []
    of.progress = dict.fromkeys(PLACES, 20 + 10 * skipped)
    assert of._next(of.cycle) == [] or skipped >= MOST_SKIPPED
    return of._next(of.cycle) if of.cycle.phase == CyclePhase.IDLE else [Send("", m.Ok())]


def test_captures_are_skipped_and_counted_until_the_protected_one_gives_way() -> None:
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    held = {"n0": (new, old), "n1": (new, old)}
    soon = training(coordinator(), **held)
    assert full(soon, skipped=MOST_SKIPPED, away=1.0) == []
    assert f"want of encoders, {MOST_SKIPPED} skipped so far" in headline(soon)
    assert full(training(coordinator(), **held), skipped=1, away=1e6) == []
    late = training(coordinator(), **held)
    assert full(late, skipped=MOST_SKIPPED, away=1e6)
    assert late.skips.total == MOST_SKIPPED


def test_captures_wait_for_the_memory_of_further_slots() -> None:
    of = training(coordinator(), n0=(), n1=())
    told: list[str] = []
    of.observers.subscribe(lambda event: told.append(event.text))
    of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    answer = m.LeaseAnswer("n0", False, dict.fromkeys(PLACES, 20), "", 1.0)
    assert of.cycle is not None
    for shortage in ("", "no memory", "no memory"):
        of._on_answer(msgspec.structs.replace(answer, unmade=True, shortage=shortage))
        assert of._next(of.cycle) == []
    assert "skipped for memory to be made" in headline(of)
    held, lacking = told
    assert held == "memory of a further slot is being made: captures are skipped"
    assert lacking == "n0: no memory; no snapshot is taken before there is room"
    of._on_answer(answer)
    assert of._next(of.cycle)


def test_nothing_is_given_up_while_a_refused_permit_is_waited_for() -> None:
    """A node cannot take snapshots for now: there is no capture that needs the room."""
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(coordinator(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.observers.subscribe(lambda event: told.append(event.kind))
    assert of.cycle is not None
    of.cycle.schedule.permitted(1_000_000)
    of.cycle.schedule.refused()
    assert full(of, skipped=MOST_SKIPPED, away=1e6) == []
    assert "given_up" not in told


def test_the_coordinator_looks_how_long_a_capture_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, timing = JobKeys.derive(SECRET), Timing(encode_timeout=0.01)
    of = training(Coordinator(keys, Observers(), lambda world: None, timing))
    cycle = of.cycle
    assert cycle is not None and cycle.propose(20, "")
    of.progress = dict.fromkeys(PLACES, 1000)

    async def story() -> None:
        aborted = asyncio.Event()

        def perform(cycle: SnapshotCycle, actions: list[Action]) -> None:
            if any(isinstance(a, Send) and isinstance(a.message, m.Abort) for a in actions):
                aborted.set()

        monkeypatch.setattr(of, "_perform", perform)
        pump = asyncio.create_task(of._pump(cycle))
        try:
            await asyncio.wait_for(aborted.wait(), 20)
        finally:
            pump.cancel()

    run(story())


def test_a_local_snapshot_whose_parity_finds_wrong_bytes_counts_as_damaged() -> None:
    """Without that word the headline would promise what no rank could load."""
    new = m.HeldSnapshot(NEW, 20, False)
    of = training(coordinator(), n0=(new,), n1=(new,))
    assert "iteration 20 survives a crash" in headline(of)
    of._ended(
        SnapshotEnded(NEW, 20, "local", "wrong bytes", again=True, corrupt=frozenset({"dp0"}))
    )
    assert "nothing in memory survives a crash" in headline(of)
    assert of.cycle is not None
    of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    of.encoders.expect("w1", ("n0",))
    of.encoders.on_event(m.NodeEvent("n0", 1, m.EncoderHello(1, "w1", 1)))
    grants = [a.message for a in of._next(of.cycle) if isinstance(a, Send)]
    assert grants and all(isinstance(g, m.Grant) for g in grants), "no parity of wrong bytes"


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
        await admit(of, 1, ["node0"], {})
        await until_quiet(of)
        assert any(lease.summary for lease in Leases.seen)
        status = await asyncio.to_thread(ask, node.environment.socket, m.StatusRequest())
        told = json.loads(status.summary)
        assert told == {**summary(of), m.MADE: told[m.MADE]}
        of.connect("node0", endpoint)  # as after the SMP was replaced: nothing is known of it
        first = len(Leases.seen)
        await until_quiet(of)
        assert Leases.seen[first].summary
        await of.close()

    try:
        run(story())
    finally:
        node.kill()


def test_the_newest_summary_is_shown_and_not_that_of_the_longest_lease(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    nodes = [SmpNode(tmp_path / "job", f"node{i}") for i in range(2)]

    async def story() -> None:
        of = coordinator(heartbeat=60.0)
        for node in nodes:
            node.start()
        for node in nodes:
            of.connect(node.environment.node, await node.endpoint())
        await admit(of, 1, list(of.links), {})
        await of.refresh()
        await of.refresh()
        await of._beat(of.links["node1"], 600.0)
        of.note_move("node1", state="moved")
        of._summary._until = 0.0
        await of._beat(of.links["node0"], 300.0)
        job = (await asyncio.to_thread(status.collect, tmp_path, "job"))["job"]
        leases = [view["lease_seconds_left"] for _, view in sorted(job["nodes"].items())]
        assert 0 < leases[0] < leases[1] and job["supervised"]
        assert job["summary"]["moves"] == {"node1": {"state": "moved"}}
        await of.close()

    try:
        run(story())
    finally:
        for node in nodes:
            node.kill()


def test_status_shows_why_no_snapshot_succeeds_until_one_does() -> None:
    """As where a layout has changed in mid-run: each one is given up for the same reason."""
    of, cause = coordinator(), layout_changed("moment is new")

    def shown() -> str:
        job = {"summary": summary(of), "nodes": {}, "supervised": True}
        return status.render("job", job)

    for sequence in (1, 2, 3):
        assert ("given up" in shown()) == (sequence > 2)
        of._ended(SnapshotEnded(SnapshotId(1, sequence), sequence, "aborted", f"dp0: {cause}"))
    assert f"the last 3 snapshots were given up: dp0: {cause}" in shown()
    of._ended(SnapshotEnded(SnapshotId(1, 4), 4, "aborted", "training ends", last=True))
    assert "the last 3 snapshots were given up" in shown(), "that has a cause of its own"
    of._ended(SnapshotEnded(SnapshotId(1, 5), 5, "local"))
    assert "given up" not in shown()


def test_ranks_that_do_not_register_are_in_the_status_until_they_have() -> None:
    of = coordinator()

    def lines() -> str:
        return status.render("job", {"summary": summary(of), "nodes": {}, "supervised": True})

    of.observers.emit("unregistered", "nothing is protected: 120 s after the start")
    assert "nothing is protected: 120 s" in lines()
    of.observers.emit("training", "training", iteration=0)
    assert "nothing is protected" not in lines()


def test_a_damaged_snapshot_without_parity_makes_room_before_the_protected_one() -> None:
    """Encoders are up, and refuse it; nothing can be restored from it."""
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(coordinator(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.observers.subscribe(lambda event: told.append(event.text))
    of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    of._crowded_on, of.progress = {"n0"}, dict.fromkeys(PLACES, 20)
    assert of.cycle is not None
    assert of._next(of.cycle) == [], "it is whole as far as anybody knows"
    of.standing.damage.count_lost(NEW, {next(iter(PLACES))})
    grants = [action.message for action in of._next(of.cycle) if isinstance(action, Send)]
    assert grants and all(
        isinstance(g, m.Grant) and g.beyond_repair == NEW and not g.give_up_protected
        for g in grants
    )
    assert any("the newest snapshot is given up: its bytes are damaged" in text for text in told)


@pytest.mark.parametrize(
    ("readers", "named"),
    [
        (("drain", "70-ab12"), "the job's own drain reads a snapshot"),
        (("70-ab12",), "process 70 on n0 reads a snapshot"),
    ],
)
def test_who_holds_a_snapshot_is_named_with_what_follows(
    readers: tuple[str, ...], named: str
) -> None:
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, True)
    of = training(coordinator(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.observers.subscribe(lambda event: told.append(event.text))
    of.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    answer = m.LeaseAnswer("n0", False, dict.fromkeys(PLACES, 20), "", 1.0, pinned=True)
    of._on_answer(msgspec.structs.replace(answer, held=(new, old), readers=readers))
    assert of.cycle is not None and of._next(of.cycle) == []
    (held,) = told
    assert held == (
        f"{named}: captures are skipped until it ends, and a failure falls back to iteration 20; "
        "with --slots 3 they continue"
    )
