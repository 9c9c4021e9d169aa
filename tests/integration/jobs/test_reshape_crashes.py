"""A process is killed while a job is reshaped to fewer nodes; the result is what it must be.

After the death of a supervisor the same command is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.fault_plan import PointFault
from tests.integration.jobs.test_reshape_jobs import check
from tests.programs import elastic_training as program
from tests.support.struck_runs import StruckRun

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS, LOST = 400, "node3"
SETTINGS = {"protect": "rs:3+1", "on-no-spare": "shrink", "grow": "off"}


@pytest.fixture
def run(made: list[Any], tmp_path: Path) -> Iterator[StruckRun]:
    """A job of four nodes that can shrink."""
    training = [program.__file__, "--folder", str(tmp_path), "--iterations", str(ITERATIONS)]
    run = StruckRun(tmp_path, 4, SETTINGS, training)
    with run.open(made):
        yield run


def end(run: StruckRun) -> None:
    """Let training end, and check that all elements are as they must be."""
    run.end()
    check(run.folder, 3, ITERATIONS)


MORE = pytest.mark.all_layouts


# Arrivals count from the loss of the node.
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        pytest.param("shrink.chosen", 1, marks=MORE),
        pytest.param("shrink.noted", 1, marks=MORE),
        pytest.param("recovery.admitting", 2, marks=MORE),
        pytest.param("recovery.adopted", 1, marks=MORE),
        pytest.param("recovery.ready", 1, marks=MORE),
        pytest.param("reshape.sources", 1, marks=MORE),
        pytest.param("reshape.filled", 1, marks=MORE),
    ],
)
def test_a_supervisor_that_is_killed_is_followed_by_one_that_continues(
    run: StruckRun, point: str, nth: int
) -> None:
    lose = partial(run.cluster.kill_node, LOST)
    run.strike(PointFault("s", point, nth=nth), lose, supervisor=True)
    run.start()
    end(run)
    assert run.told.count("continuing with 3 nodes instead of 4, 3 ranks") <= 2, run.told
    assert "4 shards reshaped to 3" in run.told, run.told


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("reshape.ordered", marks=MORE),
        pytest.param("reshape.half", marks=MORE),
        pytest.param("reshape.source", marks=MORE),
    ],
)
def test_an_encoder_or_an_smp_that_is_killed_costs_another_attempt(
    run: StruckRun, point: str
) -> None:
    run.strike(PointFault("s", point), partial(run.cluster.kill_node, LOST))
    end(run)
    assert run.told.count("4 shards reshaped to 3") == 1, run.told
