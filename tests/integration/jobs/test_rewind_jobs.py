"""A job that is stopped and rewound, and what becomes of what it had done."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder, iteration_of
from megatron_ft.cli import status
from megatron_ft.cli.main import main
from megatron_ft.core.errors import UnrecoverableError
from megatron_ft.supervisor.job_state import read_record
from tests.support.disk_jobs import (
    of_kind,
    signal_trainers,
    stop_until_drained,
    wait_for,
    wait_until,
    wait_until_none_is_due,
)
from tests.support.jobs import Job, Result, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

UNHURRIED = 0.25
"""Iterations last so long that trainers stop before what is to be rewound to has left its slot."""


def rewind(job: Job, before: int, *more: str) -> int:
    words = ["--job", job.name, "--arena-dir", str(job.cluster.root)]
    words += ["--state-dir", str(job.folder / "state"), "--before-iteration", str(before)]
    return main(["rewind", *words, *more])


def test_a_stopped_job_goes_on_from_before_what_was_given_up_in_memory_and_on_disk(
    made: list[Job], tmp_path: Path, two: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints; the second is given up, and must not come back when memory is lost."""
    job = Job(
        tmp_path,
        nodes=2,
        spares=2,
        slots=3,
        iteration_seconds=UNHURRIED,
        drain_dir=tmp_path / "disk",
        drain_interval=4,
        drain_keep=9,
    )
    made.append(job)

    def stop_with_two_checkpoints(job: Job) -> None:
        stop_until_drained(job, 1)
        signal_trainers(job, signal.SIGCONT)
        due = of_kind(job, "drained")[0].fields["iteration"] + 4
        wait_until(job, lambda: of_kind(job, "committed")[-1].fields["iteration"] >= due)
        stop_until_drained(job, 2)
        # While a further drain is due, memory may hold nothing from before the last one.
        wait_until_none_is_due(job, 4)
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((8, stop_with_two_checkpoints))
    job.iteration_seconds = 0.05
    *_, older, newer = of_kind(job, "drained")
    before = newer.fields["iteration"]
    # It ended in order, and so has released its leases.
    assert not status.collect(job.cluster.root, job.name)[job.name]["supervised"]
    assert rewind(job, 1) == 2, "there is nothing from before"
    assert "--from-disk if a checkpoint" in capsys.readouterr().err
    unchanged = read_record(tmp_path / "state" / job.name, job.name)
    assert unchanged is not None and unchanged.quarantine.before is None
    assert rewind(job, before) == 0 and "run the same command again" in capsys.readouterr().out
    record = read_record(tmp_path / "state" / job.name, job.name)
    assert record is not None and record.quarantine.before == before

    def lose_memory(job: Job) -> None:
        for node in ("n0", "n1"):
            job.cluster.kill_node(node)

    job.at_event["training"] = lose_memory
    job.run()
    from_memory, from_disk = of_kind(job, "restoring")
    assert from_memory.fields["source"] == "own memory", job.story()
    assert from_memory.fields["iteration"] < before, job.story()
    assert from_disk.fields["source"] == "disk", job.story()
    assert str(older.fields["folder"]) in from_disk.text, job.story()
    assert f"{Path(newer.fields['folder']).name} is off the job's lineage" in from_disk.text
    folders = [event.fields["folder"] for event in of_kind(job, "drained")]
    assert len(folders) == len(set(folders)), "what is on disk was drained again"
    assert not difference(job.result(), two), job.story()


@pytest.mark.parametrize(
    "earlier",
    [
        pytest.param(0, id="given up", marks=pytest.mark.all_layouts),
        pytest.param(1, id="passed over"),
    ],
)
def test_what_the_framework_saved_and_the_job_goes_behind_is_no_last_resort(
    made: list[Job], tmp_path: Path, earlier: int
) -> None:
    """Until somebody names it anew: that says that it is wanted.

    What is only passed over is good, until training comes to its iteration again and saves that
    in its place: cut off then, it would be of two incarnations.
    """
    own = tmp_path / "own"
    job = Job(tmp_path, nodes=2, spares=2, slots=3, iteration_seconds=UNHURRIED, checkpoint_dir=own)
    made.append(job)

    def save_and_stop(job: Job) -> None:
        # What the job goes back to, and what it gives up.
        wait_for(job, "committed", 2)
        signal_trainers(job, signal.SIGSTOP)
        newest = of_kind(job, "committed")[-1].fields["iteration"]
        folder = checkpoint_folder(own, newest - earlier)
        folder.mkdir(parents=True)
        (folder / "data").touch()
        (own / TRACKER).write_text(str(iteration_of(folder)))
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((8, save_and_stop))
    job.iteration_seconds = 0.05
    (folder,) = own.glob("iter_*")
    assert rewind(job, iteration_of(folder) + earlier) == 0

    def lose_memory(job: Job) -> None:
        for node in ("n0", "n1"):
            job.cluster.kill_node(node)

    job.at_event["training"] = lose_memory
    with pytest.raises(UnrecoverableError, match=f"{folder}.* of what the job was rolled back"):
        job.run()
    assert of_kind(job, "restoring")[-1].fields["iteration"] < iteration_of(folder), job.story()
    (own / TRACKER).write_text(str(iteration_of(folder)))
    job.run()
    assert str(folder) in of_kind(job, "from_disk")[-1].text, job.story()
