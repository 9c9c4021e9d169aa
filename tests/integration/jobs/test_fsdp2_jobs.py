"""A plain FSDP2 loop loses a trainer and a node: uneven shards and the data position come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.fates import in_incarnation
from tests.support.jobs import FSDP2_EXAMPLE, Job, difference, oracle

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 30
"""Three passes over the data of four ranks, ten steps each."""


def test_fsdp2_trains_on_as_if_nothing_was_lost(made: list[Job], tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        nodes=4,
        spares=1,
        protect="rs:3+1",
        script=FSDP2_EXAMPLE,
        iterations=ITERATIONS,
        iteration_seconds=0.2,
    )
    made.append(job)
    job.run(
        (6, lambda job: os.kill(job.trainers()[1], signal.SIGKILL)),
        (10, in_incarnation(2, lambda job: job.cluster.kill_node("n2"))),
    )
    alone = oracle(tmp_path, 4, ITERATIONS, script=FSDP2_EXAMPLE)
    assert not difference(job.result(), alone), job.story()
    sources = [source for _, source in job.restores()]
    assert sources == ["own memory", "parity"], job.story()
