"""Flags that change when a job is run again: carried out, or refused before training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.setting import AUTO
from megatron_ft.core.errors import ConfigError
from tests.support.jobs import Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def test_what_memory_was_not_made_for_is_refused_and_the_old_flags_still_work(
    made: list[Job], tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes=2, iterations=20, slots=AUTO)
    made.append(job)
    with pytest.raises(asyncio.CancelledError):
        job.run((8, Job.interrupt))
    starts = job.kinds().count("trainers_started")
    committed = [event.fields["iteration"] for event in job.events if event.kind == "committed"]

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        usual, nodes = dict(job.more), job.nodes
        job.nodes = changes.pop("nodes", nodes)
        job.more |= changes
        with pytest.raises(error, match=match):
            job.run()
        job.more, job.nodes = usual, nodes

    drain = rf"`megatron-ft drain --job {job.name} --to DIR`.*--restore-from DIR"
    refused(ConfigError, f"--protect xor:2; you asked for replica:2.*{drain}", protect="replica:2")
    refused(ConfigError, f"--slots 2; you asked for 3.*{drain}", slots=3)
    assert job.kinds().count("trainers_started") == starts, job.story()
    refused(ConfigError, "does not say with how many ranks", nodes=1, protect="none")
    refused(ConfigError, "does not say with how many ranks", ranks_per_node=2)
    job.more |= {"drain_dir": tmp_path / "disk", "drain_interval": 10**6}
    job.run()
    (cost,) = (event.text for event in job.events if event.kind == "drain_cost")
    assert "the job's arenas were made with two" in cost, job.story()
    assert "reshaped" not in job.kinds(), job.story()
    assert job.restores()[-1][0] >= committed[-1], job.story()
