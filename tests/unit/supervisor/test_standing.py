"""Standing: whatever happens in whatever order, each answer is the newest that was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
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
