"""How many files one opens to follow the main paths; CONTRIBUTING.md names the first of each."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.repository.call_paths import (
    REPOSITORY,
    CallGraph,
    analysed,
    between,
    files_of,
    find,
    reached,
)

Leg = tuple[str, str]

SAVE = ("SnapshotManager.save", ("SnapshotManager._begin", "SnapshotManager.prepare"))
"""The start of the path, and functions that it does not enter: each is a question of its own."""
FLOOR = ("megatron_ft/core/", "megatron_ft/config/", "megatron_ft/arena/")
"""Packages that the path of ``save()`` uses and does not enter."""

COMMIT: Sequence[Leg] = (
    ("CaptureController._on_sealed", "TrainerClient.send"),
    ("LocalServer._handle", "NodeMachine.handle"),
    ("NodeMachine._sealed", "ShardSlots.seal"),
    ("LocalServer._handle", "EventPublisher._to_coordinator"),
    ("SmpLink._read", "SmpLink.receive"),
    ("EventSubscription.take", "EventSubscription.take"),
    ("Fleet.take", "Fleet.take"),
    ("SnapshotPump._on_event", "SnapshotCycle._commit"),
    ("SnapshotPump._on_event", "SmpLink.ask"),
    ("ControlServer._handle", "NodeMachine.handle"),
    ("NodeMachine._commit", "ShardSlots.commit"),
    ("ControlServer._handle", "Arena.write_slot"),
)
NODE_LOST: Sequence[Leg] = (
    ("Supervisor._train", "Incarnation.run"),
    ("Incarnation.run", "Membership.until_silence"),
    ("Membership.until_silence", "Fleet.silent_nodes"),
    ("Supervisor._train", "Recovery.run"),
    ("Recovery.run", "Membership.replace_lost"),
    ("Membership.replace_lost", "Seats.replacements"),
    ("Recovery.run", "decide.decide"),
    ("Recovery.run", "supervisor.restore.rebuild"),
    ("supervisor.restore.rebuild", "SmpLink.ask"),
    ("ControlServer._handle", "NodeMachine.handle"),
    ("NodeMachine._rebuild", "NodeMachine._order"),
    ("worker.serve", "erasure.rebuild.rebuild"),
    ("erasure.rebuild.rebuild", "Codec.kernel"),
    ("SnapshotManager.load", "trainer.restore.restore_shard"),
    ("trainer.restore.restore_shard", "VerifiedCopy.run"),
)
PATHS = {
    "A node died: what is restored, and by which steps?": (NODE_LOST, 22),
    "How does a sealed shard reach the coordinator's decision?": (COMMIT, 14),
}
"""Legs by the question of CONTRIBUTING.md, and the most files that they may take."""
MOST_FOR_SAVE = 23


@pytest.fixture(scope="module")
def graph() -> CallGraph:
    return analysed(REPOSITORY)


def named(question: str) -> set[str]:
    """The files that CONTRIBUTING.md names for a question."""
    (row,) = (
        line
        for line in (REPOSITORY / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith(f"| {question} |")
    )
    return {f"megatron_ft/{name}" for name in re.findall(r"`([\w/]+\.py)`", row)}


@pytest.mark.parametrize("question", PATHS)
def test_a_path_takes_few_files(graph: CallGraph, question: str) -> None:
    legs, most = PATHS[question]
    found = set[str]()
    for start, end in legs:
        functions = between(graph, find(graph, start), find(graph, end))
        assert functions, f"nothing leads from {start} to {end}"
        found |= files_of(graph, functions)
    assert len(found) <= most, sorted(found)
    assert named(question) <= found


def test_save_takes_few_files(graph: CallGraph) -> None:
    start, others = SAVE
    stops = {find(graph, name) for name in others}
    stops |= {name for name, file in graph.files.items() if file.startswith(FLOOR)}
    found = files_of(graph, reached(graph, find(graph, start), stops) - stops)
    assert len(found) <= MOST_FOR_SAVE, sorted(found)
    assert named("What does `save()` do?") <= found


def test_a_way_is_found_and_no_other() -> None:
    calls = {"a": {"b", "c"}, "b": {"d"}, "c": set[str](), "d": set[str](), "e": {"d"}}
    graph = CallGraph(calls, {name: f"{name}.py" for name in calls})
    assert between(graph, "a", "d") == {"a", "b", "d"}
    assert not between(graph, "c", "d")
    assert reached(graph, "a", {"b"}) == {"a", "b", "c"}
