"""A process is killed while larger arenas are made; the result is what it must be."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.fault_plan import PointFault
from tests.programs import changing_training as program
from tests.support.struck_runs import StruckRun

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi, pytest.mark.all_layouts]

ITERATIONS, CHANGE, WIDTH = 400, 60, 4096
RANKS = 4


@pytest.fixture
def run(made: list[Any], tmp_path: Path) -> Iterator[StruckRun]:
    """A job of two nodes with two ranks each; rank 0 unfreezes a layer that has no room."""
    training = [program.__file__, "--folder", str(tmp_path), "--iterations", str(ITERATIONS)]
    training += ["--change", str(CHANGE), "--width", str(WIDTH)]
    run = StruckRun(tmp_path, 2, {"protect": "xor:2", "ranks-per-node": RANKS // 2}, training)
    with run.open(made):
        yield run


@functools.cache
def expected(rank: int) -> str:
    return program.expected(rank, CHANGE, 0, ITERATIONS, WIDTH)


def end(run: StruckRun) -> None:
    """Let training end once larger arenas hold a snapshot; the state must be the expected one."""
    assert run.read_until("had outgrown", "(protected)"), run.told
    run.end()
    for rank in range(RANKS):
        found = json.loads((run.folder / f"result-{rank}.json").read_text())
        assert found["digest"] == expected(rank), run.told


@pytest.mark.parametrize(
    "point", ["renewal.noted", "renewal.aside", "renewal.made", "renewal.told"]
)
def test_a_supervisor_that_is_killed_is_followed_by_one_that_takes_the_older_arenas(
    run: StruckRun, point: str
) -> None:
    run.strike(PointFault("s", point), lambda: None, supervisor=True)
    before = len(run.told)
    run.start()
    end(run)
    again = run.told[before:]
    assert "restoring iteration" in again and "from own memory" in again, run.told


def test_an_smp_that_is_killed_costs_another_attempt(run: StruckRun) -> None:
    """It dies in SetAside, when one arena of its node is a source and the other one is not."""
    run.strike(PointFault("s", "reshape.source"), lambda: None)
    end(run)
    assert run.told.count("had outgrown") == 1, run.told
