"""Drains that cannot wait: degraded protection, SIGTERM, limited time, and disks that come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.checkpoint.disk_format import mount_point
from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.supervisor import EXIT_DRAINED, EXIT_NOT_DRAINED
from tests.support.disk_jobs import of_kind, signal_trainers, stop_until_drained, wait_until
from tests.support.fates import in_incarnation
from tests.support.jobs import EXAMPLE, ROOT, WAIT_SECONDS, Job, Result, WarmCluster, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]
NEVER = 10**6


@pytest.mark.all_layouts
def test_the_last_spare_drains_before_the_interval(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, spares=1, drain_dir=tmp_path / "disk", drain_interval=NEVER)
    made.append(job)

    def wait(job: Job) -> None:
        stop_until_drained(job, 1)
        signal_trainers(job, signal.SIGCONT)

    job.run((8, lambda job: job.cluster.kill_node("n1")), (16, in_incarnation(2, wait)))
    (urged,) = (event.text for event in of_kind(job, "drain_urged"))
    assert "no spare is left" in urged, job.story()
    assert len(of_kind(job, "drained")) == 1, job.story()
    assert not difference(job.result(), two), job.story()


def test_what_is_on_disk_is_no_older_than_asked_for(made: list[Job], tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        nodes=2,
        iterations=40,
        iteration_seconds=0.1,
        drain_dir=tmp_path / "disk",
        drain_minutes=1 / 60,
    )
    made.append(job)
    job.run()
    drained = of_kind(job, "drained")
    assert 2 <= len(drained) <= 5, job.story()


def stopped_without_a_spare(made: list[Job], folder: Path, **more: Any) -> Job:
    """A job of two nodes that stopped because one was lost."""
    job = Job(folder, nodes=2, drain_dir=folder / "disk", drain_interval=NEVER, **more)
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((8, lambda job: job.cluster.kill_node("n1") and None))
    return job


def test_a_node_that_nobody_replaces_is_rebuilt_elsewhere_and_drained(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Two nodes are lost one after the other, the second when the job has stopped already."""
    job = stopped_without_a_spare(made, tmp_path)
    (drained,) = of_kind(job, "drained")
    assert "pp0-tp0-dp1-ep0 from parity" in of_kind(job, "salvaging")[0].text, job.story()
    job.cluster.kill_node("n0")
    for node in ("n0", "n1"):
        job.cluster.revive(node)
    job.run()
    assert job.restores() == [(drained.fields["iteration"], "disk")], job.story()
    assert not difference(job.result(), two), job.story()


def test_what_a_failed_drain_did_not_bring_to_disk_is_drained_before_the_job_stops(
    made: list[Job], tmp_path: Path
) -> None:
    """The node dies as the first drain begins, and no later snapshot is committed."""
    job = Job(
        tmp_path,
        nodes=2,
        drain_dir=tmp_path / "disk",
        drain_interval=NEVER,
        time_limit_seconds=1000.0,
        at_event={"committed": lambda job: job.cluster.kill_node("n1") and None},
    )
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run()
    (drained,) = of_kind(job, "drained")
    kinds = job.kinds()
    assert kinds.index("drained") > kinds.index("salvaging"), job.story()
    assert drained.fields["iteration"] == of_kind(job, "committed")[-1].fields["iteration"]


def kill_smp(job: Job) -> None:
    job.supervisor.members.smps._handles["n0"].kill()


def test_an_smp_that_dies_during_the_last_drain_is_replaced(
    made: list[Job], tmp_path: Path
) -> None:
    job = stopped_without_a_spare(made, tmp_path, at_event={"stopping": kill_smp})
    first, again = of_kind(job, "salvaging")
    assert again.text.startswith("the SMP of n0 ended"), job.story()
    (drained,) = of_kind(job, "drained")
    assert f"iteration {drained.fields['iteration']}" in first.text, job.story()
    assert not of_kind(job, "salvage_failed"), job.story()


@pytest.mark.all_layouts
def test_an_smp_that_dies_after_training_delays_no_end(
    made: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain has written all, and would release its snapshot."""
    job = Job(tmp_path, nodes=2, drain_dir=tmp_path / "disk", drain_interval=NEVER)
    made.append(job)

    async def settle(drains: Drains) -> None:
        kill_smp(job)
        await job.supervisor.fleet.release(["n0"])
        raise AssertionError("an SMP that is gone has answered")

    monkeypatch.setattr(Drains, "settle", settle)
    job.run()
    assert "the SMP of n0 ended" in of_kind(job, "drain_failed")[0].text, job.story()
    assert job.kinds()[-1] == "finished", job.story()


def test_sigterm_drains_what_is_committed_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    name, disk = f"test-{uuid.uuid4().hex[:8]}", tmp_path / "disk"
    run = [sys.executable, "-m", "megatron_ft.cli.main", "run", "--job", name, "--nodes", "1"]
    run += ["--protect", "none", "--state-dir", str(tmp_path), "--drain-dir", str(disk)]
    run += ["--drain-interval", str(NEVER), "--drain-bandwidth-mib", "0.0001"]
    run += ["--notify-on", "drained,stopped", "--notify-command", f"cat >> {tmp_path}/told"]
    run += ["--drain-stop-seconds", "90", "--trainer-per-node"]
    run += ["--", *WarmCluster.stub(str(EXAMPLE))]
    run += ["--iterations", str(NEVER), "--losses", str(tmp_path / "losses"), "--width", "64"]
    run += ["--iteration-seconds", "0.05"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "committed" in line and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == EXIT_DRAINED, "".join(lines) + rest
        assert "the newest committed snapshot is in --drain-dir" in rest
        told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
        assert [one["kind"] for one in told] == ["drained", "stopped"]
        assert told[-1]["code"] == EXIT_DRAINED
        with open_newest(open_checkpoint(disk)) as shards:
            assert shards.info.iteration > 0 and len(shards) == 1
    finally:
        process.kill()
        VirtualCluster(name, ["node0"]).destroy()


def test_a_last_drain_outlives_trainers_that_die_of_the_same_sigterm(
    made: list[Job], tmp_path: Path
) -> None:
    """scancel signals every process of the job, and the supervisor more than once."""

    def cancel(job: Job) -> None:
        job.terminate()
        job.terminate()
        signal_trainers(job, signal.SIGKILL)

    disk = tmp_path / "disk"
    job = Job(tmp_path, nodes=2, iterations=NEVER, drain_dir=disk, drain_interval=NEVER)
    made.append(job)
    with pytest.raises(asyncio.CancelledError):
        job.run((8, cancel))
    assert job.stop.code == EXIT_DRAINED, job.story()
    assert of_kind(job, "trainer_died"), job.story()
    asked = job.kinds().index("stopping")
    committed = [e.fields["iteration"] for e in job.events[:asked] if e.kind == "committed"]
    assert of_kind(job, "drained")[-1].fields["iteration"] >= committed[-1], job.story()


def test_sigterm_without_time_says_so(made: list[Job], tmp_path: Path) -> None:
    """The disk is so slow that nothing gets there; what runs under the cap is given up."""
    job = Job(
        tmp_path,
        nodes=2,
        iterations=NEVER,
        drain_dir=tmp_path / "disk",
        drain_interval=4,
        drain_stop_seconds=0.2,
    )
    made.append(job)
    with pytest.raises(asyncio.CancelledError):
        job.run((8, Job.terminate))
    assert job.stop.code == EXIT_NOT_DRAINED and of_kind(job, "stopping"), job.story()
    assert not of_kind(job, "finished"), job.story()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_is_full_read_only_or_gone_costs_drains_and_training_goes_on(
    made: list[Job], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    subprocess.run([*mount, "-o", "size=64k"], check=True)
    assert mount_point(disk) == disk
    remount = ["mount", "-o"]
    faults = {
        "No space left": (["true"], [*remount, "remount,size=64m", str(disk)]),
        "Read-only file system": (
            [*remount, "remount,ro", str(disk)],
            [*remount, "remount,rw", str(disk)],
        ),
        "is not mounted any more": (["umount", "-l", str(disk)], mount),
    }

    def strike(job: Job) -> None:
        for words, (begin, end) in faults.items():
            # The drain that just runs may keep a disk from becoming read-only.
            wait_until(job, lambda: subprocess.run(begin).returncode == 0, str(begin))  # noqa: B023
            until_next(job, "drain_failed")
            assert words in of_kind(job, "drain_failed")[-1].text, job.story()
            subprocess.run(end, check=True)
            until_next(job, "drained")
        signal_trainers(job, signal.SIGCONT)

    job = Job(tmp_path, nodes=2, slots=3, iterations=200, drain_dir=disk, drain_interval=1)
    made.append(job)
    try:
        job.run((4, strike))
        assert "finished" in job.kinds() and not of_kind(job, "trainer_died"), job.story()
        failures = len(of_kind(job, "drain_failed"))
        assert job.supervisor.drains.failures == failures
        shown = job.supervisor.summary.view()
        assert shown["drain_failures"] == failures and "not mounted" in shown["drain_failure"]
        with open_newest(open_checkpoint(disk)) as shards:
            assert shards.info.iteration == of_kind(job, "drained")[-1].fields["iteration"]
        assert not list(disk.glob("*/.*.tmp")), "what was half written is removed"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def until_next(job: Job, kind: str) -> None:
    """Let training continue, a commit at a time, until one more drain has ended in this way.

    Trainers are stopped afterwards, and no drain runs.
    """
    before = len(of_kind(job, kind))
    while len(of_kind(job, kind)) == before:
        commits, ended = len(of_kind(job, "committed")), drains_ended(job)
        signal_trainers(job, signal.SIGCONT)
        wait_until(job, lambda: len(of_kind(job, "committed")) > commits, "for a commit")  # noqa: B023
        signal_trainers(job, signal.SIGSTOP)
        wait_until(job, lambda: drains_ended(job) > ended, "for the end of a drain")  # noqa: B023


def drains_ended(job: Job) -> int:
    return len(of_kind(job, "drained")) + len(of_kind(job, "drain_failed"))
