"""Real jobs that are drained: while they run, on demand, slowly, from what stays in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.numpy

from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.export_drained import LOCK
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli import main as cli
from megatron_ft.config.setting import AUTO
from tests.support.disk_jobs import (
    SHARDS,
    of_kind,
    signal_trainers,
    stop_until_drained,
    wait_for,
    wait_until,
)
from tests.support.fates import in_incarnation
from tests.support.jobs import Job, Result, difference
from tests.support.no_pickle import check_holds_no_pickle

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def command(job: Job, *words: str) -> int:
    where = ["--arena-dir", str(job.cluster.root), "--state-dir", str(job.folder / "state")]
    return cli.main([words[0], *where, *words[1:]])


def test_a_running_job_is_drained_and_a_lost_node_does_not_hurt(
    made: list[Job], tmp_path: Path
) -> None:
    """Three slots: captures continue while a snapshot is written."""
    disk, by_hand = tmp_path / "disk", tmp_path / "by-hand"
    job = Job(
        tmp_path, nodes=2, spares=1, protect="xor:2", slots=3, drain_dir=disk, drain_interval=6
    )
    made.append(job)
    compared: list[int] = []

    def drain_and_compare(job: Job) -> None:
        with open_newest(open_live(job.cluster.root, job.name)) as live:
            code = command(job, "drain", "--job", job.name, "--to", str(by_hand))
            source = open_checkpoint(by_hand)
            if code == 0 and live.info.snapshot == source.snapshots()[0].snapshot:
                with open_newest(source) as stored:
                    assert all(bytes(live[s].data) == bytes(stored[s].data) for s in SHARDS)
                    assert all(live[s].record == stored[s].record for s in SHARDS)
                compared.append(live.info.iteration)

    def drain_until_compared(job: Job) -> None:
        while not compared:
            drain_and_compare(job)
        stop_until_drained(job, 1)
        job.cluster.kill_node("n1")

    def drain_again(job: Job) -> None:
        # The first may have ended before the node was lost: then the next one is not due yet.
        due = of_kind(job, "drained")[0].fields["iteration"] + 6
        wait_until(job, lambda: of_kind(job, "committed")[-1].fields["iteration"] >= due)
        stop_until_drained(job, 2)
        signal_trainers(job, signal.SIGCONT)

    job.run((8, drain_until_compared), (8, in_incarnation(2, drain_again)))
    assert compared, job.story()
    drained = of_kind(job, "drained")
    assert len(drained) >= 2, job.story()
    assert "drain_failed" not in job.kinds()[job.kinds().index("restoring") :], job.story()
    folders = [Path(event.fields["folder"]) for event in drained[-2:]]
    assert set(disk.iterdir()) == set(folders), job.story()
    check_holds_no_pickle(disk)
    source = open_checkpoint(disk)
    assert [info.iteration for info in source.snapshots()] == [
        event.fields["iteration"] for event in reversed(drained[-2:])
    ]
    for info in source.snapshots():
        with source.open(info) as shards:
            assert sorted(shards) == SHARDS and shards.lineage
    arrays = safetensors.numpy.load_file(folders[-1] / f"{SHARDS[0]}.safetensors")
    assert any(name.startswith("model") for name in arrays)


def test_a_reader_holds_captures_up_and_a_stopped_job_can_still_be_read(
    made: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two slots: while one is read nothing new is captured, which is told once and counted."""
    # The newest snapshot must stay the newest for as long as it takes to pin it.
    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=4000, iteration_seconds=0.25)
    made.append(job)

    def read(job: Job) -> None:
        # On a busy machine the newest may be superseded before it is held.
        with open_newest(open_live(job.cluster.root, job.name)):
            wait_for(job, "held")
        wait_for(job, "released")
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((8, read))
    assert len(of_kind(job, "held")) == len(of_kind(job, "released")) == 1, job.story()
    assert len(of_kind(job, "aborted")) <= 1, job.story()
    assert command(job, "verify", "--job", job.name) == 0
    assert "2 shards" in capsys.readouterr().out
    assert command(job, "drain", "--job", job.name, "--to", str(tmp_path / "disk")) == 0
    for node in job.cluster.nodes():
        for pid in job.cluster.processes_of(node):
            with suppress(ProcessLookupError):  # encoders end by themselves
                os.kill(pid, signal.SIGKILL)
        while job.cluster.processes_of(node):
            time.sleep(0.01)
    assert command(job, "drain", "--job", job.name, "--to", str(tmp_path / "again")) == 0
    assert command(job, "drain", "--job", job.name, "--to", str(tmp_path / "again")) == 0
    assert "is there already" in capsys.readouterr().out
    with open_newest(open_checkpoint(tmp_path / "disk")) as one:
        with open_newest(open_checkpoint(tmp_path / "again")) as other:
            assert all(bytes(one[s].data) == bytes(other[s].data) for s in SHARDS)
    assert command(job, "verify", "--json", str(tmp_path / "again")) == 0
    (entry,) = json.loads(capsys.readouterr().out)["snapshots"]
    assert (entry["shards"], entry["problem"]) == (2, "")
    job.cluster.kill_node("n1")
    assert command(job, "verify", "--job", job.name) == 4
    assert f"no arena of {SHARDS[1]}" in capsys.readouterr().out
    job.cluster.kill_node("n0")
    assert command(job, "verify", "--job", job.name) == 2


@pytest.mark.all_layouts
def test_what_cannot_be_exported_costs_the_export_and_training_goes_on(
    made: list[Job], tmp_path: Path
) -> None:
    disk, exports = tmp_path / "disk", tmp_path / "exports"
    job = Job(
        tmp_path,
        nodes=2,
        protect="xor:2",
        drain_dir=disk,
        drain_interval=6,
        drain_export_dir=exports,
    )
    made.append(job)
    job.run((6, lambda job: wait_for(job, "export_failed")))
    failed = of_kind(job, "export_failed")
    assert "says nothing of checkpoints" in failed[0].text, job.story()
    assert of_kind(job, "drained") and job.supervisor.drains.failures == 0
    assert "finished" in job.kinds() and not of_kind(job, "trainer_died"), job.story()
    assert [one.name for one in exports.iterdir()] == [LOCK]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--drain-interval", "5"), "drain_interval is 5, but there is no drain_dir"),
        (("--drain-dir", "{tmp}", "--drain-interval", "-1"), "--drain-interval` is -1"),
        (("--drain-dir", "{tmp}", "--drain-keep", "0"), "--drain-keep` is 0"),
        (("--drain-dir", "{tmp}/file/below", "--drain-interval", "5"), "cannot be made"),
        (("--drain-export-dir", "{tmp}"), "drain_export_dir is {tmp}, but there is no drain_dir"),
        (("--drain-dir", "{tmp}"), "drain_interval is 0: nothing is written; give both"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").touch()
    given = [flag.format(tmp=tmp_path) for flag in flags]
    assert cli.main(["run", *given, "--arena-dir", str(tmp_path), "--", sys.executable]) == 2
    assert words.format(tmp=tmp_path) in capsys.readouterr().err


INTERVAL = 2
SNAIL = 0.002
"""MiB a second at which no drain of this job ends within the test."""


def committed(job: Job) -> int:
    newest = job.supervisor.standing.committed
    return -1 if newest is None else newest.iteration


def test_a_trainer_killed_during_a_slow_drain_loses_no_more_than_at_other_times(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """With two slots nothing newer than what the drain reads could be committed."""
    job = Job(
        tmp_path,
        nodes=2,
        slots=AUTO,
        drain_dir=tmp_path / "disk",
        drain_interval=4,
        drain_bandwidth_mib=SNAIL,
    )
    made.append(job)
    killed: list[tuple[int, int]] = []

    def kill(job: Job) -> None:
        wait_until(job, lambda: job.supervisor.drains._plan_begun is not None, "for a drain")
        begun = job.supervisor.drains._plan_begun
        assert begun is not None
        drained = begun[0].iteration
        newer = drained + 3 * INTERVAL
        wait_until(job, lambda: committed(job) >= newer, "for snapshots beside the drain")
        killed.append((drained, committed(job)))
        os.kill(job.trainers()[0], signal.SIGKILL)

    with pytest.raises(asyncio.CancelledError):
        job.run((4, kill), (4, in_incarnation(2, Job.interrupt)))
    ((drained, newest),) = killed
    restored, source = job.restores()[-1]
    assert (restored >= newest > drained, source) == (True, "own memory"), job.story()
    assert not {"held", "drain_cost"} & set(job.kinds()), job.story()

    job.more |= {"drain_dir": None, "drain_interval": 0, "drain_bandwidth_mib": 0.0}
    job.run()
    assert job.restores()[-1][0] >= restored, "arenas of three slots serve a job without drains"
    assert not of_kind(job, "refused") and not difference(job.result(), two), job.story()
