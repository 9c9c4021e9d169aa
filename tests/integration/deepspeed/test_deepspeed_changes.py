"""Tensors of an engine that move, come, go or are replaced: what is captured, and what is kept."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHANGES = (
    "changes_are_followed",
    "memory_that_moves_before_the_copy_costs_one_snapshot",
    "other_layouts_are_planned_anew",
)
REFUSALS = "other_layouts_are_refused"
CALLS = "a_save_makes_few_calls_for_more_tensors"
OFFLOADS = ("offloaded_memory_is_given_back", "states_move_when_no_copy_reads_them")
CASES = [
    *(
        ("tests.programs.deepspeed_change_cases:" + case, stage)
        for case in CHANGES
        for stage in ("0", "2", "3")
    ),
    ("tests.programs.deepspeed_change_cases:" + REFUSALS, "0"),
    *(("tests.programs.deepspeed_calls_cases:" + CALLS, stage) for stage in ("0", "3")),
    *(("tests.programs.deepspeed_offload_cases:" + case, "2") for case in OFFLOADS),
]
"""What is run, and at which stage of ZeRO; without it in two ranks, each of which stores a part."""


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("case", "stage"), CASES)
def test_changes_of_an_engine(case: str, stage: str, deepspeed_server: Any, tmp_path: Path) -> None:
    from tests.support.warm_host import Request

    argv, ranks = [str(tmp_path / "arena"), stage], 2 if stage == "0" else 1
    request = Request(case, argv, ranks, str(tmp_path), 60.0)
    outcome = deepspeed_server.run(request)
    assert not any(outcome.codes), outcome.story()


COVERAGE = {
    "hidden_tensors_are_refused": "2",
    "a_restore_fills_what_trains": "3",
    "frozen_and_trained_come_back": "0",
    "objects_beside_it_are_named": "2",
}
"""Stages of ZeRO that CI runs; the others run with --all."""
COVERAGE_CASES = [
    pytest.param(case, stage, marks=() if stage == ci else pytest.mark.all_layouts)
    for case, ci in COVERAGE.items()
    for stage in "0123"
]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("case", "stage"), COVERAGE_CASES)
def test_coverage_of_an_engine(
    case: str, stage: str, deepspeed_server: Any, tmp_path: Path
) -> None:
    from tests.support.warm_host import Request

    program = f"tests.programs.deepspeed_coverage_cases:{case}"
    request = Request(program, [str(tmp_path / "arena"), stage], 1, str(tmp_path), 60.0)
    outcome = deepspeed_server.run(request)
    assert not any(outcome.codes), outcome.story()
    if case == "a_restore_fills_what_trains":
        assert ("; derived in a restore: " in outcome.output(0)) == (stage != "0")
