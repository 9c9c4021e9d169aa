"""Jobs with processes that are suspended and wake up in a later incarnation, against the oracle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.orders import Timing
from tests.support.fates import Deaths, of_node, when
from tests.support.jobs import ROOT, Fault, Job, Result, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

TIMING = Timing(heartbeat=0.25, lease=3.0, node_timeout=4.0)
ITERATIONS = 30
WAIT_SECONDS = 100.0


@pytest.fixture
def new(made: list[Job], tmp_path: Path) -> Callable[..., Job]:
    def make(**settings: object) -> Job:
        standard = {"nodes": 2, "timing": TIMING, "iterations": ITERATIONS}
        job = Job(tmp_path, **{**standard, **settings})  # type: ignore[arg-type]
        made.append(job)
        return job

    return make


def suspend(pids: Callable[[Job], list[int]], until: Callable[[Job], bool]) -> Fault:
    """SIGSTOP, and SIGCONT once something has happened."""

    def strike(job: Job) -> None:
        opened = [os.pidfd_open(pid) for pid in pids(job)]
        assert opened
        for pidfd in opened:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_SECONDS
        while not until(job):
            assert time.monotonic() < deadline, job.story()
            time.sleep(0.02)
        for pidfd in opened:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    return strike


def restarted(job: Job) -> bool:
    return job.kinds().count("training") == 2


def after(seconds: float) -> Callable[[Job], bool]:
    """Whether so much time has passed since the first question."""
    asked: list[float] = []

    def passed(job: Job) -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > seconds

    return passed


@pytest.mark.parametrize(
    "needed", [False, pytest.param(True, marks=pytest.mark.all_layouts)], ids=["", "needed"]
)
def test_a_suspended_smp_wakes_up_to_nothing_of_its_own(
    new: Callable[..., Job], two: Result, needed: bool
) -> None:
    job, deaths = new(spares=1, iteration_seconds=0.3), Deaths()

    def smp(job: Job) -> list[int]:
        deaths.watch(job.trainers()[1])
        return of_node(job, "n1", "megatron_ft.smp")

    def another(job: Job) -> None:
        job.cluster.kill_node("n0")

    job.run((8, suspend(smp, restarted)), *([(16, another)] if needed else []))
    # Killed with its incarnation, not when the next trainers start: a rebuild lies between.
    halfway = (when(job, "restoring") + when(job, "trainers_started", 1)) / 2
    assert max(deaths.all()) < halfway, job.story()
    assert job.supervisor.members.active == ["n1" if needed else "n0", "n2"], job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_a_spare_that_falls_silent_while_it_receives_is_replaced_by_the_next(
    new: Callable[..., Job], two: Result
) -> None:
    """Its encoder stands still, and nobody but its SMP could tell."""
    job = new(spares=2)

    def encoder_comes(event: m.NodeEvent) -> None:
        if isinstance(event.body, m.EncoderHello) and event.node == "n2":
            os.kill(event.body.pid, signal.SIGSTOP)

    def lose_another_within(job: Job) -> None:
        job.supervisor.fleet.listen(encoder_comes)
        job.cluster.kill_node("n1")
        while not _is_rebuilt(job, "n2"):
            assert "interrupted" not in job.kinds(), job.story()
            time.sleep(0.02)
        for pid in of_node(job, "n2", "megatron_ft.smp"):
            os.kill(pid, signal.SIGSTOP)

    job.run((8, lose_another_within))
    reasons = [event.text for event in job.events if event.kind == "interrupted"]
    assert reasons == ["no heartbeat from n2"], job.story()
    assert job.supervisor.members.active == ["n0", "n3"], job.story()
    assert not difference(job.result(), two), job.story()


def _is_rebuilt(job: Job, node: str) -> bool:
    """Whether a slot there waits for encoders to fill it."""
    for path in job.cluster.node_dir(node).glob("*.arena"):
        with Arena.open(path) as arena:
            states = [arena.slot(i).state for i in range(arena.geometry.slot_count)]
            return SlotState.REBUILDING in states
    return False


@pytest.mark.all_layouts
def test_a_suspended_trainer_is_waited_for(new: Callable[..., Job], two: Result) -> None:
    job = new()
    trainer = suspend(lambda job: [job.trainers()[1]], after(6.0))
    job.run((8, trainer))
    assert job.kinds().count("trainers_started") == 1, job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_a_suspended_trainer_of_an_earlier_incarnation_never_wakes_up(
    new: Callable[..., Job], two: Result
) -> None:
    job, deaths = new(spares=1), Deaths()

    def trainer(job: Job) -> list[int]:
        deaths.watch(job.trainers()[1])
        return [job.trainers()[1]]

    def another_is_lost(job: Job) -> bool:
        if job.cluster.reachable("n0"):
            job.cluster.kill_node("n0")
        return restarted(job)

    job.run((8, suspend(trainer, another_is_lost)))
    assert max(deaths.all()) < when(job, "trainers_started", 1), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_a_suspended_encoder_is_ended_and_replaced(new: Callable[..., Job], two: Result) -> None:
    job, deaths = new(timing=replace(TIMING, encode_timeout=2.0), iteration_seconds=0.3), Deaths()

    def encoder(job: Job) -> list[int]:
        found = of_node(job, "n1", "erasure.worker")
        deaths.watch(*found)
        return found

    job.run((8, suspend(encoder, lambda job: "world_ended" in job.kinds())))
    assert deaths.all() and "world_broken" in job.kinds(), job.story()
    assert job.kinds().count("trainers_started") == 1, job.story()
    assert not difference(job.result(), two), job.story()


class Commands:
    """Supervisors of one job as processes, each with notes of its own."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, state: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megatron_ft.cli.main", "run", "--job", self._job.name]
        command += ["--nodes", "2", "--protect", "xor:2", "--lease-seconds", "3"]
        command += ["--state-dir", str(self._folder / state), "--", *self._job.training_command()]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._started.append(process)
        return process

    def read_until(self, process: subprocess.Popen[str], words: str) -> str:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if words in line:
                return said
        raise AssertionError(f"{words!r} was never said: {said}")

    def end(self, process: subprocess.Popen[str]) -> str:
        said, _ = process.communicate(timeout=WAIT_SECONDS)
        return said

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.mark.all_layouts
def test_a_suspended_supervisor_calls_nobody_lost_when_it_wakes_up(
    new: Callable[..., Job], tmp_path: Path, two: Result
) -> None:
    job = new(iteration_seconds=0.2)
    commands = Commands(job, tmp_path)
    try:
        only = commands.start("state")
        commands.read_until(only, "(protected)")
        only.send_signal(signal.SIGSTOP)
        time.sleep(6.0)  # longer than lease and node timeout: that nothing happens is the event
        only.send_signal(signal.SIGCONT)
        said = commands.end(only)
    finally:
        commands.close()
    assert only.returncode == 0, said
    assert "lost" not in said.replace("iterations are lost", "") and "own memory" in said, said
    assert not difference(job.result(), two), said


@pytest.mark.all_layouts
def test_a_suspended_supervisor_that_was_replaced_ends(
    new: Callable[..., Job], tmp_path: Path, two: Result
) -> None:
    """Its notes are copied, as no lock would let two of them have the same."""
    job = new(iteration_seconds=0.2)
    commands = Commands(job, tmp_path)
    try:
        first = commands.start("state")
        commands.read_until(first, "(protected)")
        first.send_signal(signal.SIGSTOP)
        refused = commands.start("state")
        assert "already has a supervisor" in commands.end(refused) and refused.returncode
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        second = commands.start("copy")
        taken = commands.read_until(second, "training")
        first.send_signal(signal.SIGCONT)
        last_words = commands.end(first)
        said = taken + commands.end(second)
    finally:
        commands.close()
    assert second.returncode == 0, said
    assert "own memory" in said, said
    assert first.returncode not in (0, None) and "another supervisor" in last_words, last_words
    assert not difference(job.result(), two), said
