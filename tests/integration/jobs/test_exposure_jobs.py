"""Exposure proven by killing: what status says of a loss is what the recovery restores."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli import status
from megatron_ft.cli.main import main as cli
from megatron_ft.core.errors import UnrecoverableError
from megatron_ft.launchers.launcher import NodeUnreachable
from tests.support.disk_jobs import of_kind, wait_for, wait_until
from tests.support.exposures import said_of
from tests.support.fates import of_node
from tests.support.jobs import Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

NODES, SPARES = 4, 2
ENDLESS = 100_000


class Losses:
    """Losses of nodes of one job, each compared with what was said of it before."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.seen: list[tuple[str, int, str]] = []

    def active(self) -> list[str]:
        return list(self.job.supervisor.members.active)

    def lose(self, lost: Sequence[str], state: str) -> None:
        """Kill these nodes while the newest snapshot is in this state; they return as spares."""
        job, pump, standing = self.job, self.job.supervisor.pump, self.job.supervisor.standing
        self._have(state)
        self._still(True)
        if state == "damaged":
            assert standing.committed is not None
            shard = self.random.choice(sorted(pump.cycle.places))  # type: ignore[union-attr]
            standing.damage.lost.add((shard, standing.committed.snapshot))
        said = said_of(lost, self.shown())
        trained, restored = len(of_kind(job, "training")), len(of_kind(job, "restoring"))
        for node in lost:
            job.cluster.kill_node(node)
        wait_for(job, "training", trained + 1)
        assert len(of_kind(job, "restoring")) > restored, job.story()
        found = of_kind(job, "restoring")[-1].fields
        source = "disk" if found["source"] == "disk" else "memory"
        assert said == (found["iteration"], source), f"{lost} {state}\n{job.story()}"
        self.seen.append((state, len(lost), source))
        for node in lost:
            job.cluster.revive(node)
        self._still(False)
        wait_until(job, lambda: standing.committed is not None, "for a commit")
        commits = len(of_kind(job, "committed"))
        wait_for(job, "committed", commits + 2)

    def _have(self, state: str) -> None:
        """A newest snapshot without parity, or one with it."""
        job, wanted = self.job, "local" if state == "local" else "protected"
        encoders = job.supervisor.encoder_group.processes
        start = encoders.start
        if state == "local":
            encoders.start = _refuse  # type: ignore[method-assign, assignment]
            for pid in of_node(job, self.active()[0], "megatron_ft.erasure.worker"):
                os.kill(pid, signal.SIGKILL)
        committed = len(of_kind(job, "committed"))
        wait_until(
            job,
            lambda: any(e.fields["level"] == wanted for e in of_kind(job, "committed")[committed:]),
            f"for a {wanted} snapshot",
        )
        if state == "local":
            self._still(True)
            encoders.start = start  # type: ignore[method-assign]

    def _still(self, still: bool) -> None:
        """Pause snapshots, and wait for what is under way, on disk too."""
        job = self.job
        where = ["--job", job.name, "--arena-dir", str(job.cluster.job_dir.parent)]
        assert cli(["pause" if still else "resume", *where]) == 0
        quiet_since = time.monotonic()

        def still_now() -> bool:
            nonlocal quiet_since
            cycle, drains = job.supervisor.pump.cycle, job.supervisor.drains
            paused = job.supervisor.pump.paused
            if not (paused and cycle and cycle.phase.value == "idle") or drains._plan_begun:
                quiet_since = time.monotonic()
            return time.monotonic() - quiet_since > 2 * job.timing.heartbeat

        if still:
            wait_until(job, still_now, "for snapshots and drains to stop")

    def shown(self) -> dict[str, Any]:
        """The exposure in status, once its supervisor has written the newest summary."""
        job, pump, standing = self.job, self.job.supervisor.pump, self.job.supervisor.standing
        shown = dict[str, Any]()

        def current() -> bool:
            view = status.collect(job.cluster.job_dir.parent, job.name)[job.name]["summary"]
            cycle = pump.cycle
            report = {} if cycle is None else standing.exposure(cycle.stripe_map).report
            shown.update(status.exposure(view))
            return bool(report) and view == {**view, **report}

        wait_until(job, current, "for status to show this")
        return shown


def _refuse(*_: object) -> str:
    raise NodeUnreachable("no encoders in this test")


def job_of(folder: Path, drain_dir: Path | None = None) -> Job:
    return Job(
        folder,
        nodes=NODES,
        spares=SPARES,
        protect="xor:2",
        slots=3,
        iterations=ENDLESS,
        drain_dir=drain_dir,
        drain_interval=40 if drain_dir else 0,
    )


def elsewhere(capsys: pytest.CaptureFixture[str], *where: str) -> bool:
    """True if status and top of a machine without an SMP show nodes and a measured restart."""
    if cli(["status", *where]):
        return False
    shown = capsys.readouterr().out
    assert "no SMP of it answers here" in shown
    assert cli(["top", *where[:2], *where[4:]]) == 0
    top = capsys.readouterr().out
    known = all(f"n{number} " in top for number in range(1, NODES + 1))
    return known and "losing any one node: iteration" in shown and "and a restart" not in shown


@pytest.mark.all_layouts
def test_a_node_and_then_a_whole_stripe_cost_what_status_said(
    made: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without drains the stripe is the end.  A machine without an SMP reads the state folder."""
    job = job_of(tmp_path)
    made.append(job)

    def strike(job: Job) -> None:
        losses = Losses(job, 1)
        losses.lose([losses.active()[0]], "protected")
        where = ["--state-dir", str(tmp_path / "state"), "--arena-dir", str(tmp_path / "none")]
        capsys.readouterr()
        wait_until(job, lambda: elsewhere(capsys, *where, "--job", job.name), "for its file")
        whole = losses.shown()["pairs"][0]["nodes"]
        assert said_of(whole, losses.shown()) == (-1, "")
        for node in whole:
            job.cluster.kill_node(node)

    with pytest.raises(UnrecoverableError):
        job.run((6, strike))
    assert [source for _, source in job.restores()][0] == "parity", job.story()


@pytest.mark.all_layouts
@pytest.mark.timeout(1200)
def test_every_node_and_twenty_pairs_cost_what_status_said(made: list[Job], tmp_path: Path) -> None:
    job = job_of(tmp_path, tmp_path / "disk")
    made.append(job)
    states = ["protected", "local", "damaged"]
    done: list[Losses] = []

    def strike(job: Job) -> None:
        losses = Losses(job, 7)
        wait_for(job, "drained")
        for position, state in product(range(NODES), states):
            losses.lose([losses.active()[position]], state)
        for _ in range(20):
            pair = losses.random.sample(losses.active(), 2)
            losses.lose(pair, losses.random.choice(states))
        done.append(losses)
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((6, strike))
    (losses,) = done
    assert len(losses.seen) == 3 * NODES + 20
    kinds = {(count, source) for _, count, source in losses.seen}
    assert kinds >= {(1, "memory"), (2, "memory"), (2, "disk")}, losses.seen
