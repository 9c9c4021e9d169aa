"""The rules of docs/explanation/protocol.md under random interleavings, all on or one of them off.

MEGATRON_FT_MODEL_WALKS (default 6, one in each climate) is the number of walks per shape; run a
few thousand after a change to the protocol.  "20-60" are those with these seeds.  A failure prints
the shortest list of steps found, which ``replay`` takes again (MEGATRON_FT_MODEL_SHORTEN=0: only
what went wrong, at once).  The other half of this file switches the rules off one by one: the
same walks must then lose something, or they would prove nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from tests.protocol.model import holes
from tests.protocol.model.judge import Violation
from tests.protocol.model.shape import Shape
from tests.protocol.model.walks import Part, Until, directed, explain, walk

SHORTEN = os.environ.get("MEGATRON_FT_MODEL_SHORTEN", "1") != "0"
RESETS = Shape("xor", 2, 1, spares=1, slots=2, stripes=2, resets=True)
SHAPES = {
    "xor:3": Shape("xor", 2, 1, spares=1, slots=2),
    "xor:3, 3 slots": Shape("xor", 2, 1, spares=1, slots=3),
    "xor:3, 2 stripes": Shape("xor", 2, 1, spares=1, slots=2, stripes=2),
    "xor:3, 2 stripes, resets": RESETS,
    "rs:2+2": Shape("rs", 2, 2, spares=1, slots=2),
    "none": Shape("none", 1, 0, spares=0, slots=2),
    "xor:3, survivors": Shape("xor", 2, 1, spares=1, slots=2, survivors=True),
    "xor:3, readers": Shape("xor", 2, 1, spares=1, slots=2, readers=True),
    "xor:3, disk, damage": Shape("xor", 2, 1, spares=1, slots=2, disk=True, damage=True),
    "replica": Shape("replica", 1, 1, spares=1, slots=2),
    "replica, disk": Shape("replica", 1, 1, spares=1, slots=2, disk=True),
    "replica, damage": Shape("replica", 1, 1, spares=1, slots=2, damage=True),
}


# Kinds of steps that are more or less frequent, so that walks get where chance seldom leads.
LONG_SLEEP = {"suspend": 0.0, "suspend_writing": 2.0, "resume": 0.03, "start_incarnation": 3.0}
SLOW_DEATH = {**LONG_SLEEP, "suspend_writing": 6.0, "end": 0.005, "give_up": 20.0, "lose": 0.0}
COME_AND_GO = {"cut": 8.0, "heal": 0.5, "lose": 4.0, "world": 0.2}
SLOW_READERS = {"read": 0.05, "smp_crash": 5.0}
RESTARTS = {"start_incarnation": 10.0, "world": 0.1}
CLIMATES: tuple[Mapping[str, float], ...] = (
    {},
    LONG_SLEEP,
    SLOW_DEATH,
    COME_AND_GO,
    SLOW_READERS,
    RESTARTS,
)
"""Walks take them in turn, by their seed."""


def seeds(words: str) -> range:
    """Those that MEGATRON_FT_MODEL_WALKS asks for."""
    first, _, last = words.rpartition("-")
    return range(int(first or 0), int(last))


SEEDS = seeds(os.environ.get("MEGATRON_FT_MODEL_WALKS", "6"))

# A node is cut off with a local snapshot that its job then goes back behind; when it returns,
# the spare in its place is lost, and it takes its old place with its old bytes.
CUT_OFF: list[Part] = [
    Until(lambda world: world.judge.floor is not None),
    ("smp_crash", "n0", False),  # its encoder leaves, and with it the world
    Until(lambda world: world.judge.local_floor != world.judge.floor, {"world": 0.0}),
    ("cut", "n1"),
    Until(lambda world: world.trains_on("s0"), {"heal": 0.0, "propose": 0.0, "repair": 0.0}),
    ("lose", "s0"),
    ("heal", "n1"),
    Until(lambda world: world.trains_on("n1"), {"repair": 0.0}),
]


# What is drained is local only and lost with a node, while the disk cannot be read; the job
# continues  from the last protected one.  Then the disk is back, and there is another recovery.
ROLLED_BACK_ON_DISK: list[Part] = [
    Until(lambda world: world.judge.floor is not None),
    ("smp_crash", "n0", False),
    Until(
        lambda world: world.judge.local_floor == world.newest != world.judge.floor, {"world": 0.0}
    ),
    Until(
        lambda world: any(one.snapshot == world.newest for one in world.disk),
        {"world": 0.0, "propose": 0.0},
    ),
    ("disk_away",),
    ("lose", "n1"),
    Until(lambda world: world.trains_on("s0"), {"disk_back": 0.0, "propose": 0.0, "repair": 0.0}),
    ("disk_back",),
    ("restart",),
    Until(lambda world: world.trains_on("s0"), {"drain": 0.0}),
]


def test_a_checkpoint_that_was_rolled_back_is_not_taken() -> None:
    assert directed(SHAPES["replica, disk"], 0, ROLLED_BACK_ON_DISK) == ""


def test_without_the_lineage_of_drains_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    holes.any_checkpoint(monkeypatch)
    problem = directed(SHAPES["replica, disk"], 0, ROLLED_BACK_ON_DISK)
    assert "was rolled back and is served" in problem


@pytest.mark.parametrize("seed", range(5))
def test_what_was_rolled_back_does_not_come_back_with_a_node(seed: int) -> None:
    assert directed(SHAPES["xor:3"], seed, CUT_OFF) == ""


def test_without_the_lineage_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    holes.no_lineage(monkeypatch)
    problems = [directed(SHAPES["xor:3"], seed, CUT_OFF) for seed in range(5)]
    assert any("was rolled back and is served" in problem for problem in problems)


@pytest.mark.parametrize("name", SHAPES)
def test_no_interleaving_loses_a_snapshot(name: str) -> None:
    """All rules on: I1 and I2 hold after every step, and the walks are not idle ones."""
    commits = reads = 0
    for seed in SEEDS:
        steps, world, problem = walk(SHAPES[name], seed, bias=CLIMATES[seed % len(CLIMATES)])
        found = explain(SHAPES[name], steps) if problem and SHORTEN else problem
        assert not problem, f"walk {seed}: {found}"
        commits += world.commits
        reads += world.whole_reads
    assert commits >= len(SEEDS)
    assert reads >= len(SEEDS) * SHAPES[name].readers


CUTS = {"cut": 8.0, "heal": 0.5, "lose": 0.0, "smp_crash": 0.1}
CUTS_ONLY = {"cut": 8.0, "heal": 0.5, "lose": 0.0}
LATE_AND_LOST = {"repeat": 2.0, "event": 0.3, "propose": 0.3, "lose": 3.0, "reset": 0.0}
SLOW_DRAINS = {"write": 0.03, "drain": 5.0}
LATE_DRAINS = {"restart": 10.0, "orphan": 0.1, "drain": 10.0, "publish": 0.3, "write": 5.0}


def test_permits_that_come_again_would_stop_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost by it, but a job comes to less than half as many commits."""
    commits = []
    for switched_off in (False, True):
        if switched_off:
            holes.late_permits(monkeypatch)
        walks = [walk(RESETS, seed, bias=CLIMATES[seed % len(CLIMATES)]) for seed in range(8)]
        assert not any(problem for _, _, problem in walks)
        commits.append(sum(world.commits for _, world, _ in walks))
    assert commits[1] < commits[0] / 2


@dataclass(frozen=True)
class Hole:
    """How to walk into it: kinds of steps that lead there, a seed near it, what is found."""

    found: str
    seed: int = 0
    shape: str = "xor:3"
    bias: Mapping[str, float] = field(default_factory=dict)


HOLES: dict[Callable[[pytest.MonkeyPatch], None], Hole] = {
    holes.no_doubt: Hole("reuses its slot in doubt", 104, "replica"),
    holes.local_is_enough: Hole("no newer one is protected everywhere"),
    holes.protected_is_enough: Hole("I2b: ", 9),
    holes.per_rank_skip: Hole("it is being captured"),
    holes.iteration_is_identity: Hole("would be served as", 48, "xor:3, 3 slots", RESTARTS),
    holes.no_fence: Hole("run at once", 13, bias=LONG_SLEEP),
    holes.word_is_enough: Hole("run at once", 16, "xor:3, survivors", LONG_SLEEP),
    holes.no_wait_for_writers: Hole("would be rebuilt from parity of", 320, bias=SLOW_DEATH),
    holes.encode_early: Hole("it is being captured"),
    holes.digests_at_home: Hole("nobody can verify"),
    holes.parity_stays_valid: Hole("would be rebuilt from parity of"),
    holes.target_counts_as_whole: Hole("would be served as"),
    holes.anybody_owns: Hole("starts from nothing", 89, bias=COME_AND_GO),
    holes.shadows: Hole("I2: ", 58),
    holes.no_pins: Hole("while pinned", shape="xor:3, readers", bias=SLOW_READERS),
    holes.no_second_look: Hole("a reader took", shape="xor:3, readers", bias=SLOW_READERS),
    holes.drain_unpinned: Hole("while pinned", 39, "replica, disk", bias=SLOW_DRAINS),
    holes.lease_ends_nobody: Hole("run at once", shape="replica, disk", bias=CUTS),
    holes.replaced_at_once: Hole("run at once", 9, "replica, disk", CUTS),
    holes.late_words_obeyed: Hole("after a newer one", 2, "replica, disk", RESTARTS),
    holes.tidied_by_an_older_incarnation: Hole(
        "gone from the disk", 7, "replica, disk", LATE_DRAINS
    ),
    holes.published_and_tidied_at_once: Hole(
        "gone from the disk", 59, "replica, disk", LATE_DRAINS
    ),
    holes.encoded_again: Hole("must be served", 8, "xor:3, 2 stripes, resets", LATE_AND_LOST),
    holes.notes_ignored: Hole("rolled back and is served", 402, "replica, disk", CUTS_ONLY),
}
MOST_WALKS = 200


@pytest.mark.parametrize("switch_off", HOLES, ids=lambda hole: hole.__name__)
def test_without_a_rule_something_is_lost(
    switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    hole = HOLES[switch_off]
    for seed in range(hole.seed, hole.seed + MOST_WALKS):
        problem = walk(SHAPES[hole.shape], seed, bias=hole.bias)[2]
        if problem.startswith(Violation.__name__) and hole.found in problem:
            return
    pytest.fail(f"{MOST_WALKS} walks without the rule and nothing was lost: the model is blind")
