"""Loops of Accelerate lose a trainer and a node: all that the Accelerator keeps comes back."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate", allow_module_level=True)

from tests.programs import accelerate_fsdp2  # noqa: E402
from tests.support.jobs import Job, difference, oracle  # noqa: E402

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 50
"""Five passes over the data of four ranks, ten steps each."""

WIDTH = 257
"""Weights that no number of ranks divides, and that DDP's ranks capture in parts."""

SCRIPTS = {"ddp": accelerate_fsdp2.EXAMPLE, "fsdp2": Path(accelerate_fsdp2.__file__)}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.all_layouts) for kind in SCRIPTS]
)
def test_an_accelerator_trains_on_as_if_nothing_was_lost(
    kind: str, made: list[Job], tmp_path: Path
) -> None:
    shape = {"nodes": 4, "spares": 1, "protect": "rs:3+1", "iterations": ITERATIONS, "width": WIDTH}
    job = Job(tmp_path, script=SCRIPTS[kind], iteration_seconds=0.1, **shape)
    made.append(job)
    job.run(
        (6, lambda job: os.kill(job.trainers()[1], signal.SIGKILL)),
        (24, lambda job: job.cluster.kill_node("n2")),
    )
    alone = oracle(tmp_path, 4, ITERATIONS, WIDTH, SCRIPTS[kind])
    assert not difference(job.result(), alone), job.story()
    sources = [source for _, source in job.restores()]
    assert sources == ["own memory", "parity"], job.story()
