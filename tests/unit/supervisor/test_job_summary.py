"""The summary of a job: what failures fall back to, and why no snapshot is taken."""

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
from megatron_ft.cli.main import main as cli
from megatron_ft.core import private_files
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import MOST_SKIPPED
from megatron_ft.supervisor.admission import admit
from megatron_ft.supervisor.cycle import Action, CyclePhase, Send, SnapshotCycle, SnapshotEnded
from megatron_ft.supervisor.exposure import Exposure, StripeMap
from megatron_ft.supervisor.job_state import STATUS
from megatron_ft.supervisor.orders import Timing, stripe_orders
from megatron_ft.supervisor.schedule import Schedule
from megatron_ft.supervisor.snapshots import SnapshotPump
from megatron_ft.supervisor.summary import JobSummary
from megatron_ft.trainer.binding import layout_changed
from tests.support.pumps import answer, pump
from tests.support.smp_node import SmpNode, run


def pump_of(heartbeat: float = 0.5) -> SnapshotPump:
    lease = max(10.0, 5 * heartbeat)
    timing = Timing(heartbeat=heartbeat, lease=lease, node_timeout=1.5 * lease)
    return pump(timing)


def summary(of: SnapshotPump) -> dict[str, Any]:
    more = {"spares": [], "watch": {}, "drain_failures": 0, "drain_failure": ""}
    return JobSummary(of, lambda: more).view()


PLACES = {"dp0": "n0", "dp1": "n1"}
OLD, NEW = SnapshotId(1, 1), SnapshotId(1, 2)
STRIPES = stripe_orders(
    [StripeState("replica", 1, 1, 128, tuple(PLACES), 64)], PLACES, sorted(PLACES.values())
)


def training(of: SnapshotPump, **held: tuple[m.HeldSnapshot, ...]) -> SnapshotPump:
    """In the middle of training, with what each node has said to hold."""
    of.cycle = SnapshotCycle(1, PLACES, STRIPES, Schedule(10))
    of.standing.held = dict(held)
    of.standing.commits(OLD, 10, "protected")
    of.standing.commits(NEW, 20, "local")
    return of


def headline(of: SnapshotPump) -> str:
    job = {"summary": summary(of), "nodes": {}, "supervised": True}
    return status.render("job", job).splitlines()[0]


def test_the_headline_says_what_each_failure_falls_back_to_now() -> None:
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(pump_of(), n0=(new, old), n1=(new, old))
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
        of = pump_of()
        cycle = SnapshotCycle(1, PLACES, STRIPES, Schedule(10))
        looked = asyncio.Event()

        async def refresh() -> None:
            of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
            of.fleet.take_answer(answer("n0", paused=True))
            looked.set()

        monkeypatch.setattr(of.fleet, "refresh", refresh)
        of.start(cycle)
        await asyncio.wait_for(looked.wait(), 30)
        phase = cycle.phase
        of.fleet.links.clear()
        await of.fleet.close()
        return phase

    assert run(story()) == CyclePhase.IDLE


def crowd(of: SnapshotPump) -> None:
    """Have a node say that its slots are full, besides what it holds."""
    of.fleet.take_answer(answer("n0", crowded=True, held=of.standing.held.get("n0", ())))


def full(of: SnapshotPump, *, skipped: int, away: float) -> list[Action]:
    """What is permitted beside a protected snapshot and a newer local one, without encoders."""
    crowd(of)
    of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    of._world_seen = time.monotonic() - away
    assert of.cycle is not None
    of.fleet.progress = dict.fromkeys(PLACES, 20)
    assert of._next(of.cycle) == []
    of.fleet.progress = dict.fromkeys(PLACES, 20 + 10 * skipped)
    assert of._next(of.cycle) == [] or skipped >= MOST_SKIPPED
    return of._next(of.cycle) if of.cycle.phase == CyclePhase.IDLE else [Send("", m.Ok())]


def test_captures_are_skipped_and_counted_until_the_protected_one_gives_way() -> None:
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    held = {"n0": (new, old), "n1": (new, old)}
    soon = training(pump_of(), **held)
    assert full(soon, skipped=MOST_SKIPPED, away=1.0) == []
    assert f"skipped: no encoder is running, {MOST_SKIPPED} skipped so far" in headline(soon)
    assert full(training(pump_of(), **held), skipped=1, away=1e6) == []
    late = training(pump_of(), **held)
    assert full(late, skipped=MOST_SKIPPED, away=1e6)
    assert late.skips.total == MOST_SKIPPED


def test_captures_wait_for_the_memory_of_further_slots() -> None:
    of = training(pump_of(), n0=(), n1=())
    told: list[str] = []
    of.fleet.observers.subscribe(lambda event: told.append(event.text))
    of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    said = answer("n0", progress=dict.fromkeys(PLACES, 20))
    assert of.cycle is not None
    for shortage in ("", "no memory", "no memory"):
        of.fleet.take_answer(msgspec.structs.replace(said, unmade=True, shortage=shortage))
        assert of._next(of.cycle) == []
    assert "skipped: the memory of a slot is made" in headline(of)
    held, lacking = told
    assert held == "memory of a further slot is being made: captures are skipped"
    assert lacking == "n0: no memory; no snapshot is taken before there is room"
    of.fleet.take_answer(said)
    assert of._next(of.cycle)


def test_nothing_is_given_up_while_a_refused_permit_is_waited_for() -> None:
    """A node cannot take snapshots for now: there is no capture that needs the room."""
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(pump_of(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.fleet.observers.subscribe(lambda event: told.append(event.kind))
    assert of.cycle is not None
    of.cycle.schedule.permitted(1_000_000)
    of.cycle.schedule.refused()
    assert full(of, skipped=MOST_SKIPPED, away=1e6) == []
    assert "given_up" not in told


async def test_the_coordinator_looks_how_long_a_capture_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = Timing(encode_timeout=0.01)
    of = training(pump(timing))
    cycle = of.cycle
    assert cycle is not None and cycle.propose(20, "")
    of.fleet.progress = dict.fromkeys(PLACES, 1000)
    aborted = asyncio.Event()

    def perform(cycle: SnapshotCycle, actions: list[Action]) -> None:
        if any(isinstance(a, Send) and isinstance(a.message, m.Abort) for a in actions):
            aborted.set()

    monkeypatch.setattr(of, "_perform", perform)
    running = asyncio.create_task(of._pump(cycle))
    try:
        await asyncio.wait_for(aborted.wait(), 20)
    finally:
        running.cancel()


def test_a_local_snapshot_whose_parity_finds_wrong_bytes_counts_as_damaged() -> None:
    """Without that word the headline would promise what no rank could load."""
    new = m.HeldSnapshot(NEW, 20, False)
    of = training(pump_of(), n0=(new,), n1=(new,))
    assert "iteration 20 survives a crash" in headline(of)
    of._ended(
        SnapshotEnded(NEW, 20, "local", "wrong bytes", again=True, corrupt=frozenset({"dp0"}))
    )
    assert "nothing in memory survives a crash" in headline(of)
    assert of.cycle is not None
    of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    of.encoders.expect("w1", ("n0",))
    of.encoders.on_event(m.NodeEvent("n0", 1, m.EncoderHello(1, "w1", 1)))
    grants = [a.message for a in of._next(of.cycle) if isinstance(a, Send)]
    assert grants and all(isinstance(g, m.Grant) for g in grants), "no parity of wrong bytes"


def test_status_is_of_the_supervisor_and_of_each_smp_that_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SMP knows where the supervisor writes; the lease shows if a supervisor leads the job."""
    node, file = SmpNode(tmp_path / "arenas" / "job", job="job"), tmp_path / "elsewhere" / STATUS
    node.environment.node_dir.parent.mkdir(parents=True)
    private_files.make_folder(file.parent)
    where = ["status", "--arena-dir", str(tmp_path / "arenas"), "--state-dir", str(tmp_path)]

    def shown() -> str:
        assert cli(where) == 0
        return capsys.readouterr().out

    async def story() -> None:
        node.start(str(file))
        of = pump_of(heartbeat=60.0)
        of.fleet.connect("node0", await node.endpoint())
        await admit(of.fleet, 1, ["node0"], {})
        await of.fleet.refresh()
        text = await asyncio.to_thread(shown)
        assert "whose status cannot be read: give its --state-dir" in text and "(spare)" in text
        of.fleet.evacuations.note_move("node0", state="moved")
        told = {"time": time.time() - 3600.0, "summary": summary(of), "ranks": {}}
        private_files.replace_file(file, json.dumps(told).encode())
        text = await asyncio.to_thread(shown)
        assert "incarnation 1" in text and "(evacuated)" in text and "wrote this" not in text
        await of.fleet.close(release=True)
        text = await asyncio.to_thread(shown)
        assert "no supervisor" in text and "its supervisor wrote this 3600 s ago" in text
        assert "node0      (evacuated)" in text

    try:
        run(story())
    finally:
        node.kill()


def test_status_shows_why_no_snapshot_succeeds_until_one_does() -> None:
    """As where a layout has changed in mid-run: each one is given up for the same reason."""
    of, cause = pump_of(), layout_changed("moment is new")

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
    of = pump_of()
    known = JobSummary(of, lambda: {"spares": [], "watch": {}})

    def lines() -> str:
        return status.render("job", {"summary": known.view(), "nodes": {}, "supervised": True})

    of.fleet.observers.emit("unregistered", "nothing is protected: 120 s after the start")
    assert "nothing is protected: 120 s" in lines()
    of.fleet.observers.emit("training", "training", iteration=0)
    assert "nothing is protected" not in lines()


def test_a_damaged_snapshot_without_parity_makes_room_before_the_protected_one() -> None:
    """Encoders are up, and refuse it; nothing can be restored from it."""
    old, new = m.HeldSnapshot(OLD, 10, True), m.HeldSnapshot(NEW, 20, False)
    of = training(pump_of(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.fleet.observers.subscribe(lambda event: told.append(event.text))
    of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    crowd(of)
    of.fleet.progress = dict.fromkeys(PLACES, 20)
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
    of = training(pump_of(), n0=(new, old), n1=(new, old))
    told: list[str] = []
    of.fleet.observers.subscribe(lambda event: told.append(event.text))
    of.fleet.links = dict.fromkeys(PLACES.values())  # type: ignore[assignment]
    said = answer("n0", progress=dict.fromkeys(PLACES, 20), pinned=True)
    of.fleet.take_answer(msgspec.structs.replace(said, held=(new, old), readers=readers))
    assert of.cycle is not None and of._next(of.cycle) == []
    (held,) = told
    assert held == (
        f"{named}: captures are skipped until it ends, and a failure falls back to iteration 20; "
        "with --slots 3 they continue"
    )
