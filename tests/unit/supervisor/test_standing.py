"""Standing: each answer is the newest that was told, and damaged shards are counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.exposure import StripeMap
from megatron_ft.supervisor.standing import Standing

PLACES = {"dp0": "n0", "dp1": "n1"}
EVENTS = st.sampled_from(["local", "protected", "drained", "void", "lost", "begin", "resume"])


@given(st.lists(EVENTS, max_size=30))
def test_standing_answers_with_the_newest_of_each_kind(story: list[str]) -> None:
    standing = Standing(DamagedShards(Observers()))
    committed = protected = durable = resumed = None
    for number, event in enumerate(story):
        snapshot = SnapshotId(1, number)
        match event:
            case "local" | "protected":
                standing.commits(snapshot, number, event)
                committed = number
                protected = number if event == "protected" else protected
            case "drained":
                standing.drains(snapshot, number)
                durable = number
            case "void":
                standing.gives_up_checkpoint()
                durable = None
            case "lost":
                standing.loses_memory()
                committed = protected = None
            case "begin":
                standing.restores(None)
                resumed = None
            case "resume":
                standing.resumes(number)
                resumed = number
    report = standing.report(None)
    shown = {name: report[name] and report[name]["iteration"] for name in ("committed", "durable")}
    assert shown == {"committed": committed, "durable": durable}
    assert (report["crash"], report["node_loss"]) == (committed, protected)
    assert report["resumed_from"] == resumed


def test_only_a_newest_snapshot_that_nothing_serves_is_beyond_repair() -> None:
    standing, stripes = Standing(DamagedShards(Observers())), StripeMap(PLACES, ())
    old, new = SnapshotId(1, 1), SnapshotId(1, 2)
    standing.commits(old, 10, "local")
    standing.commits(new, 20, "local")
    held = (m.HeldSnapshot(new, 20, False), m.HeldSnapshot(old, 10, False))
    standing.holds("n0", held)
    standing.damage.count_lost(new, ["dp1"])
    assert standing.beyond_repair(PLACES.values(), stripes) is None, "n1 has said nothing yet"
    standing.holds("n1", held)
    assert standing.beyond_repair(PLACES.values(), stripes) == new
    assert standing.fallbacks(stripes).crash == m.HeldSnapshot(old, 10, False)
    standing.damage.lost.clear()
    assert standing.beyond_repair(PLACES.values(), stripes) is None


ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)


def told(observers: Observers) -> list[JobEvent]:
    events: list[JobEvent] = []
    observers.subscribe(events.append)
    return events


def test_what_a_scrub_finds_counts_as_lost_and_is_told_once() -> None:
    events = told(observers := Observers())
    damage = DamagedShards(observers)
    for blocks in (2, 2, 3):
        damage.on_event(m.NodeEvent("n0", 1, m.BadBlocks("dp0", ONE, blocks)))
    damage.on_event(m.NodeEvent("n0", 1, m.Missed("dp1", ONE)))
    assert damage.lost == {("dp0", ONE)}
    assert [(e.kind, e.fields) for e in events] == [("corrupt", {"shard": "dp0"})]


def test_what_encoders_find_of_a_local_snapshot_counts_as_lost() -> None:
    events = told(observers := Observers())
    damage = DamagedShards(observers)
    damage.count_lost(ONE, {"dp1", "dp0"})
    damage.count_lost(ONE, {"dp0"})
    assert damage.lost == {("dp0", ONE), ("dp1", ONE)}
    assert [event.fields["shard"] for event in events] == ["dp0", "dp1"]


def test_damage_of_what_nobody_holds_any_more_is_not_shown() -> None:
    damage = DamagedShards(Observers())
    damage.count_lost(ONE, {"dp0"})
    damage.count_lost(TWO, {"dp0", "dp1"})
    assert damage.held([m.HeldSnapshot(TWO, 4, True)]) == 2
    assert damage.held([]) == 0


def test_an_arena_whose_bytes_are_refused_twice_in_a_row_is_named() -> None:
    events = told(observers := Observers())
    damage = DamagedShards(observers)
    places = {"dp0": "n0", "dp1": "n1"}
    damage.count_refused({"dp0"}, places)
    damage.all_accepted()
    damage.count_refused({"dp0", "dp1"}, places)
    assert events == []
    damage.count_refused({"dp1"}, places)
    damage.count_refused({"dp1"}, places)
    (event,) = events
    assert event.kind == "suspect" and event.fields == {"shard": "dp1", "node": "n1"}
    assert "the arena of dp1 on n1" in event.text and "evacuate n1" in event.text
