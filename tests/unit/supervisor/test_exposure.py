"""The exposure of a job, against the recovery's decision on what is left of it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.decide import StripeState, decide
from megatron_ft.cli import status
from megatron_ft.cli.main import main as cli
from megatron_ft.core import private_files
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.slot_rules import EMPTY_SLOT
from megatron_ft.supervisor.exposure import MOST_GROUPS, NOTHING, Exposure, Fallback, StripeMap
from megatron_ft.supervisor.job_state import STATUS
from megatron_ft.supervisor.orders import stripe_orders
from tests.protocol.model.memory import MemoryArena, MemorySlot, inventory_after_fence, record_of
from tests.support.exposures import said_of

SNAPSHOTS = [SnapshotId(1, number) for number in (1, 2, 3)]
LINEAGE = (Ancestor(1, None),)


@dataclass(frozen=True)
class World:
    """A job: stripes, the node of each shard, and what each node holds, True where with parity."""

    stripes: tuple[StripeState, ...]
    places: Mapping[str, str]
    held: Mapping[str, Mapping[SnapshotId, bool]]
    damaged: Collection[tuple[str, SnapshotId]] = ()
    durable: tuple[SnapshotId, int] | None = None

    @property
    def nodes(self) -> list[str]:
        return sorted(set(self.places.values()))

    @property
    def stripe_map(self) -> StripeMap:
        return StripeMap(self.places, stripe_orders(self.stripes, self.places, self.nodes))

    def exposure(self) -> Exposure:
        held = {
            node: tuple(m.HeldSnapshot(s, 10 * s.sequence, parity) for s, parity in some.items())
            for node, some in self.held.items()
        }
        stripe_map = self.stripe_map
        for parity, count in product((True, False), (1, 2, 3)):
            # What is kept of whole snapshots must not be taken for others.
            whole = tuple(m.HeldSnapshot(s, s.sequence, parity) for s in SNAPSHOTS[:count])
            assert Exposure(stripe_map, dict.fromkeys(self.nodes, whole)).report
        return Exposure(stripe_map, held, self.damaged, self.durable)

    def decided(self, lost: Collection[str]) -> Fallback:
        """The decision of a recovery that finds the other nodes, and what it takes from disk."""
        left = [node for node in self.nodes if node not in lost]
        inventories = [inventory_after_fence(node, self._arenas(node)) for node in left]
        count = len(self.places)
        memory = decide(inventories, shard_count=count, corrupt=self.damaged, lineage=LINEAGE)
        if memory.snapshot and (self.durable is None or memory.snapshot >= self.durable[0]):
            return Fallback(memory.snapshot, memory.iteration, "memory")
        return NOTHING if self.durable is None else Fallback(*self.durable, "disk")

    def _arenas(self, node: str) -> list[MemoryArena]:
        shards = [shard for shard, place in self.places.items() if place == node]
        stripe_of = {shard: stripe for stripe in self.stripes for shard in stripe.members}
        return [
            MemoryArena(
                shard,
                stripe_of[shard],
                1,
                LINEAGE,
                [self._slot(shard, *one) for one in self.held[node].items()],
            )
            for shard in shards
        ]

    def _slot(self, shard: str, snapshot: SnapshotId, parity: bool) -> MemorySlot:
        iteration = 10 * snapshot.sequence
        header = replace(
            EMPTY_SLOT,
            state=SlotState.COMMITTED,
            snapshot=snapshot,
            iteration=iteration,
            local_only=not parity,
            record=record_of(snapshot, shard, iteration),
            parity_valid=parity,
        )
        return MemorySlot(header)


SCHEMES = [(1, 0), (1, 1), (2, 1), (3, 1), (2, 2)]


def world(data: int, parity: int, groups: int, per_node: int = 1, **of: Any) -> World:
    """Groups of nodes; each has a stripe for every shard of a node, of one member a node."""
    size = data + parity
    places = {f"s{i}-{r}": f"n{i:02}" for i in range(groups * size) for r in range(per_node)}
    stripes = tuple(
        StripeState("rs" if parity else "none", data, parity, 128, members, 64)
        for group in range(groups)
        for r in range(per_node)
        for members in [tuple(f"s{i}-{r}" for i in range(group * size, (group + 1) * size))]
    )
    known = dict.fromkeys(sorted(set(places.values())), dict.fromkeys(SNAPSHOTS[:2], True))
    return World(stripes, places, **{"held": known, **of})


@st.composite
def worlds(draw: st.DrawFn, *, mixed: bool) -> World:
    """Snapshots without parity, nodes that lack some, damaged shards; ``mixed``: parity that only
    some nodes of a snapshot have."""
    plain = world(*draw(st.sampled_from(SCHEMES)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    if draw(st.booleans()):
        # Spares of the same rack: members of a stripe share a node.
        moved = draw(st.sampled_from(plain.nodes)), draw(st.sampled_from(plain.nodes))
        places = {s: moved[1] if n == moved[0] else n for s, n in plain.places.items()}
        plain = replace(plain, places=places)
    parity = {snapshot: draw(st.booleans()) for snapshot in SNAPSHOTS}
    held = {
        node: {
            snapshot: draw(st.booleans()) if mixed else parity[snapshot]
            for snapshot in SNAPSHOTS
            if draw(st.integers(0, 7)) < 7
        }
        for node in plain.nodes
    }
    shards = st.tuples(st.sampled_from(sorted(plain.places)), st.sampled_from(SNAPSHOTS))
    damaged = draw(st.sets(shards, max_size=3))
    durable = draw(st.sampled_from([None, (SNAPSHOTS[0], 10), (SNAPSHOTS[2], 30)]))
    return replace(plain, held=held, damaged=damaged, durable=durable)


@given(worlds(mixed=True))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_every_node_and_every_pair_falls_back_to_what_a_recovery_decides(one: World) -> None:
    exposure = one.exposure()
    for lost in [(), *combinations(one.nodes, 1), *combinations(one.nodes, 2)]:
        assert exposure.after(lost) == one.decided(lost), lost


@given(worlds(mixed=False))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_report_names_each_pair_that_costs_more_than_its_nodes(one: World) -> None:
    shown = status.exposure(summary(one))
    for lost in [*combinations(one.nodes, 1), *combinations(one.nodes, 2)]:
        fallback = one.decided(lost)
        assert said_of(lost, shown) == (fallback.iteration, fallback.source), lost


def test_damage_of_two_snapshots_in_two_places_costs_both() -> None:
    """No stripe is shared: after either loss another snapshot serves, and none after both."""
    one = world(2, 1, 2, damaged={("s0-0", SNAPSHOTS[0]), ("s3-0", SNAPSHOTS[1])})
    (group,) = [g for g in one.exposure().report["pairs"] if g["others"]]
    assert {tuple(group["nodes"]), tuple(group["others"])} == {("n01", "n02"), ("n04", "n05")}
    assert group["source"] == ""


def summary(one: World, **of: Any) -> dict[str, Any]:
    known = {"nodes": one.nodes, "idle": [], "spares": [], "iteration": 22, "watch": {}}
    return {**known, **one.exposure().report, **of}


def lines(of: dict[str, Any]) -> list[str]:
    return list(status._exposure_lines(of))


def test_status_says_what_each_loss_costs() -> None:
    one = world(2, 1, 1, durable=(SnapshotId(1, 0), 4))
    assert lines(summary(one)) == [
        "losing any one node: iteration 20 (2 iterations)",
        "losing any two of n00, n01 and n02: disk, iteration 4 (18 iterations)",
        "free spares: none, a lost node cannot be replaced",
    ]
    watch = {"iteration_seconds": 0.5, "restarts": {"parity": 3.0}}
    assert lines(summary(one, watch=watch, spares=["n03"])) == [
        "losing any one node: iteration 20 (2 iterations, about 4.0 s)",
        "losing any two of n00, n01 and n02: disk, iteration 4 (18 iterations, about 9.0 s and a "
        "restart)",
        "free spares: n03",
    ]
    local = replace(one, damaged={("s0-0", SNAPSHOTS[1])}, durable=None)
    assert lines(summary(local))[:2] == [
        "losing n00: iteration 20 (2 iterations)",
        "losing any other node: iteration 10 (12 iterations)",
    ]
    assert "nothing that this job keeps" in lines(summary(local))[2]


def test_json_has_every_node_and_names_what_was_not_measured() -> None:
    shown = status.exposure(summary(world(2, 1, 2), idle=["n05"]))
    assert list(shown["nodes"]) == ["n00", "n01", "n02", "n03", "n04"]
    assert shown["nodes"]["n00"]["restart_seconds"] is None
    groups = [one["nodes"] for one in shown["pairs"]]
    assert groups == [["n00", "n01", "n02"], ["n03", "n04", "n05"]]


def write_status(folder: Path, job: str, age: float) -> None:
    private_files.make_folder(folder / job)
    known = {"incarnation": 1, "committed": None, "encoders": "up", "skipping_for": ""}
    found = summary(world(2, 1, 1), **known)
    content = json.dumps({"time": time.time() - age, "summary": found}).encode()
    private_files.replace_file(folder / job / STATUS, content)


def test_a_login_node_shows_what_supervisors_have_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["status", "--arena-dir", str(tmp_path / "none"), "--state-dir", str(tmp_path)]
    assert cli(where) == 2 and "no supervisor has left a status" in capsys.readouterr().err
    write_status(tmp_path, "runs", 1.0)
    write_status(tmp_path, "ended", 3600.0)
    write_status(tmp_path, "foreign", 1.0)
    (tmp_path / "foreign" / STATUS).chmod(0o666)
    assert cli(where) == 0
    shown = capsys.readouterr().out
    assert "job runs: incarnation 1" in shown and "losing any two of n00, n01 and n02" in shown
    assert "ended" not in shown and "foreign" not in shown
    assert cli([*where, "--job", "ended"]) == 0
    shown = capsys.readouterr().out
    assert "no supervisor" in shown and "wrote this 3600 s ago" in shown
    assert cli([*where, "--job", "foreign"]) == 2 and "has mode 666" in capsys.readouterr().err
    assert cli([*where, "--job", "runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]["exposure"]
    assert found["nodes"]["n02"]["lost_iterations"] == 2


def test_two_thousand_nodes_cost_little_from_one_commit_to_the_next() -> None:
    """The rest is done once: what each loss leaves of a snapshot depends on the layout alone."""
    one = world(4, 1, 410)
    stripe_map, groups = one.stripe_map, 410
    least = 1.0
    for number in range(5):
        commit = m.HeldSnapshot(SnapshotId(2, number), 100 + number, True)
        held = dict.fromkeys(one.nodes, (commit,))
        began = time.monotonic()
        report = Exposure(stripe_map, held).report
        least = min(least, time.monotonic() - began)
    assert report["any_node"] == {"iteration": 104, "source": "memory"}
    assert len(report["pairs"]) == MOST_GROUPS
    assert report["more_pairs"] == groups - MOST_GROUPS
    assert least < 0.05
