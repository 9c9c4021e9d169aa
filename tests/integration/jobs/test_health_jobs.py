"""Jobs with a health command: nodes that it votes against, and commands that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from megatron_ft.core.environment import NODE
from megatron_ft.core.errors import ConfigError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.health import Vote
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership, NoSpareError
from megatron_ft.supervisor.supervisor import Supervisor
from tests.support.disk_jobs import of_kind
from tests.support.fates import in_incarnation
from tests.support.jobs import Fault, Job, Uninterrupted, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ON_N1 = f'test "${NODE}" = n1'


def kill_rank(rank: int) -> Fault:
    return lambda job: os.kill(job.trainers()[rank], signal.SIGKILL)


def test_a_spare_takes_the_place_of_a_node_that_becomes_unhealthy(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    sick = tmp_path / "sick"
    command = f"if {ON_N1} && test -e {sick}; then echo ECC errors; exit 3; fi"
    job = Job(tmp_path, nodes=2, spares=1, health_command=command)
    made.append(job)

    def fall_ill(job: Job) -> None:
        sick.touch()
        kill_rank(0)(job)

    job.run((6, fall_ill))
    assert not difference(job.result(), uninterrupted(2, 40)), job.story()
    assert job.supervisor.members.active == ["n0", "n2"], job.story()
    assert job.restores()[-1][1] == "parity", job.story()
    (event,) = of_kind(job, "unhealthy")
    assert event.fields["node"] == "n1" and "ended with 3: ECC errors" in event.text
    assert not of_kind(job, "node_lost")


@pytest.mark.all_layouts
def test_ranks_leave_a_node_on_request_if_the_command_fails_there(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    sick = tmp_path / "sick"
    command = f"if {ON_N1} && test -e {sick}; then echo ECC errors; exit 3; fi"
    job = Job(
        tmp_path, nodes=2, spares=1, health_command=command, iterations=160, iteration_seconds=0.08
    )
    made.append(job)

    def ask_twice(job: Job) -> None:
        words = ["evacuate", "n1", "--if-unhealthy", "--job", job.name]
        words += ["--arena-dir", str(job.cluster.root), "--wait-seconds", "60"]
        assert main(words) == 1, job.story()
        assert "evacuated: its health command says healthy" in of_kind(job, "not_evacuated")[0].text
        sick.touch()
        assert main(words) == 0, job.story()

    job.run((6, ask_twice))
    assert not difference(job.result(), uninterrupted(2, 160)), job.story()
    assert job.supervisor.members.active == ["n0", "n2"], job.story()
    assert "ECC errors" in of_kind(job, "unhealthy")[0].text


@pytest.mark.all_layouts
def test_without_a_spare_an_unhealthy_node_is_used(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """A spare is unhealthy, too; the node where the command hangs is not held to be."""
    command = f'case "${NODE}" in n0) sleep 60;; *) exit 1;; esac'
    job = Job(tmp_path, nodes=2, spares=1, health_command=command, health_seconds=1.0)
    made.append(job)
    job.run()
    assert not difference(job.result(), uninterrupted(2, 40)), job.story()
    assert job.supervisor.members.active == ["n0", "n1"], job.story()
    texts = {event.fields["node"]: event.text for event in of_kind(job, "unhealthy")}
    assert texts.keys() == {"n1", "n2"} and "it is used: no spare is free" in texts["n1"]
    assert [event.fields["node"] for event in of_kind(job, "health_unknown")] == ["n0"]


@pytest.mark.all_layouts
def test_a_node_that_fails_twice_in_a_row_is_avoided_until_no_other_is_left(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    job = Job(tmp_path, nodes=2, spares=1)
    made.append(job)

    def lose_spare(job: Job) -> None:
        assert job.supervisor.members.active == ["n0", "n2"], job.story()
        job.cluster.kill_node("n2")

    again, last = in_incarnation(2, kill_rank(1)), in_incarnation(3, lose_spare)
    job.run((6, kill_rank(1)), (12, again), (18, last))
    assert not difference(job.result(), uninterrupted(2, 40)), job.story()
    (event,) = of_kind(job, "avoided")
    assert event.text.startswith("n1 caused two failures in a row: rank 1"), event.text
    assert job.supervisor.members.active == ["n0", "n1"], job.story()


@pytest.mark.parametrize("last_resort", [True, False])
def test_the_next_supervisor_knows_which_nodes_are_a_last_resort(
    made: list[Job], tmp_path: Path, last_resort: bool
) -> None:
    job = Job(tmp_path, nodes=2, spares=1)
    made.append(job)
    admitted = {node: m.Inventory(node, 1, ()) for node in ("n0", "n1", "n2")}
    with members_of(job) as members:
        seats = members.seats.evacuate("n1").exclude("n1", last_resort=last_resort)
        members.take(seats.train_on(["n0", "n2"]))
        members.replace_lost(admitted)
    with members_of(job) as members:
        members.take(members.seats.train_on(["n0", "n2"]))
        del admitted["n2"]
        lost = nullcontext() if last_resort else pytest.raises(NoSpareError, match="give n1 back")
        with lost:
            members.replace_lost(admitted)
        assert members.active == ["n0", "n1" if last_resort else "n2"]


@contextmanager
def members_of(job: Job) -> Iterator[Membership]:
    """The membership of a supervisor of its own, of a job that does not begin."""
    with JobState(job.folder / "state" / job.name, job.name) as state:
        yield Supervisor(job.spec(), job.cluster, state).members


def test_a_command_that_runs_nowhere_is_refused_before_training(
    made: list[Job], tmp_path: Path
) -> None:
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\n")
    job = Job(tmp_path, nodes=2, health_command=str(hook))
    made.append(job)
    with pytest.raises(ConfigError, match="cannot be run: .*ermission denied"):
        job.run()
    assert "trainers_started" not in job.kinds(), job.story()


def votes(job: Job) -> dict[str, Vote]:
    """One round of votes, of a job that does not begin."""
    job.spec().log_dir.mkdir()
    with JobState(job.folder / "state" / job.name, job.name) as state:
        return asyncio.run(Supervisor(job.spec(), job.cluster, state).health.vote())


def left(job: Job) -> list[int]:
    """Numbers of the processes that still run on the nodes."""
    return [pid for node in ("n0", "n1") for pid in job.cluster.processes_of(node)]


@pytest.mark.parametrize(
    ("command", "verdict"),
    [
        ("yes | head -c 50000000; echo done", "healthy"),
        ("yes | head -c 50000000; echo too hot >&2; false", "unhealthy"),
        ("yes", "unknown"),
        ("sleep 61 & setsid sleep 61 & wait", "unknown"),
        ("sleep 61 & setsid sleep 61 & exit 0", "healthy"),
        ("trap '' TERM INT; echo stuck; while :; do sleep 61; done", "unknown"),
        ("kill -9 $$", "unhealthy"),
    ],
)
def test_commands_that_misbehave(
    made: list[Job], tmp_path: Path, command: str, verdict: str
) -> None:
    """Nothing of them is left, their logs are small, and a vote takes no longer than it may."""
    job = Job(tmp_path, nodes=2, health_command=command, health_seconds=3.0)
    made.append(job)
    began = time.monotonic()
    found = votes(job)
    assert {vote.verdict for vote in found.values()} == {verdict}, found
    assert time.monotonic() - began < 15
    deadline = time.monotonic() + 10
    while left(job) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(job)
    logs = list((tmp_path / "logs").glob("health-*.log"))
    assert len(logs) == 2 and all(log.stat().st_size < 100_000 for log in logs)
    if "too hot" in command:
        assert found["n0"].reason == "it ended with 1: too hot"
