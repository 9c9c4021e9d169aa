"""Small jobs explored exhaustively within bounds, and what that rests on.

The whole table is made by ``python tests/protocol/explore_protocol.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.schedule import Schedule
from tests.protocol.explore_protocol import Row, explore, row
from tests.protocol.model import holes
from tests.protocol.model.canonical import KNOWN, key
from tests.protocol.model.clone import clone
from tests.protocol.model.enabled import enabled, is_fault
from tests.protocol.model.shape import Bounds
from tests.protocol.model.world import World
from tests.protocol.slot_transitions import figure

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "protocol.md"
ROWS = [
    row(1, 2, 1),
    row(2, 1, 0),
    row(2, 1, 1, 0, spares=1, disk=True),
    row(2, 1, 1, 0, spares=1, damage=True),
    row(2, 1, 1, 0, spares=1, survivors=True),
    row(3, 1, 1, 0, ("cut", "lose", "restart", "suspend_writing"), spares=1),
]


@pytest.mark.parametrize("one", ROWS, ids=str)
def test_every_run_within_bounds_keeps_what_it_must(one: Row) -> None:
    result = explore(one)
    assert not result.problem, "\n".join([result.problem, *map(str, result.path)])
    assert result.complete and result.states > 300


FOUND: dict[Callable[[pytest.MonkeyPatch], None], Row] = {
    holes.lease_ends_nobody: row(2, 1, 1, 0, ("cut",), spares=1),
    holes.replaced_at_once: row(2, 1, 1, 0, ("cut",), spares=1),
    holes.word_is_enough: row(2, 1, 2, 0, ("suspend_writing", "die"), survivors=True),
    holes.no_fence: row(1, 1, 2, None, ("suspend", "restart")),
}


@pytest.mark.parametrize("switch_off", FOUND, ids=lambda hole: hole.__name__)
def test_without_a_rule_an_exploration_finds_it(
    switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not explore(FOUND[switch_off]).problem
    switch_off(monkeypatch)
    result = explore(FOUND[switch_off])
    assert "run at once" in result.problem


@pytest.mark.parametrize("walk", range(8))
def test_a_clone_goes_its_own_way(walk: int) -> None:
    """A step on the copy changes neither the world nor what comes of the same step there."""
    world, choose = World(row(2, 1, 0).shape, Bounds(1)), Random(walk).choice
    for _ in range(60):
        steps = [step for _, step in enabled(world) if not is_fault(step)]
        if not steps:
            break
        step = choose(steps) if walk else steps[0]
        before = key(world)
        after = []
        for _ in range(2):
            copy = clone(world)
            copy.perform(step)
            after.append(key(copy))
        assert key(world) == before and after[0] == after[1]
        world.perform(step)
        assert key(world) == after[0]


@pytest.mark.parametrize(
    "machine",
    [NodeMachine("n0"), ShardSlots("dp0", []), SnapshotCycle(1, {}, (), Schedule(1)), Schedule(1)],
    ids=lambda machine: type(machine).__name__,
)
def test_no_field_of_the_machines_is_forgotten_in_the_key(machine: object) -> None:
    """A new one belongs into canonical.py, unless it decides nothing there; then into KNOWN."""
    assert set(vars(machine)) == set(KNOWN[type(machine).__name__].split())


def test_the_picture_in_the_docs_is_the_code() -> None:
    assert figure() in DOCS.read_text(), (
        "python tests/protocol/slot_transitions.py prints the figure"
    )
