"""Jobs whose trainers are forked from trainer hosts, and lose trainers, a host and a node."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli import status
from megatron_ft.core import procfs
from megatron_ft.core.environment import IMPORTS_NAME
from tests.support.disk_jobs import wait_for
from tests.support.jobs import Fault, Job, Result, difference
from tests.support.warm_host import is_client

ANEW = {"MEGATRON_FT_RESTART": "new-process"}
"""Survivors are ended too, so that each rank is forked again."""

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def trainer_of(job: Job, node: str) -> int:
    """The process that trains on a node: neither its host nor the client that stands for it."""
    ranks = [p for p in job.cluster.processes_of(node) if "RANK" in procfs.read_environment(p)]
    (found,) = (pid for pid in ranks if not is_client(pid))
    return found


def host_of(job: Job, node: str) -> int:
    """The host that has forked the trainer of a node."""
    host = parent_of(trainer_of(job, node))
    assert "trainer_host.py" in command_of(host)
    return host


def noted_on(job: Job, node: str) -> list[str]:
    """The modules that the host of a node imports ahead."""
    found: list[str] = json.loads((job.cluster.node_dir(node) / IMPORTS_NAME).read_bytes())
    return found


def once_recovered(number: int, fault: Fault) -> Fault:
    """The fault, once this many recoveries are reported, which a heartbeat after them brings."""

    def strike(job: Job) -> None:
        wait_for(job, "recovered", number)
        fault(job)

    return strike


def test_a_job_loses_trainers_a_host_and_a_node_and_nothing_changes(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, spares=1, own_hosts=True, environment=ANEW)
    made.append(job)
    hosts: list[int] = []
    shown: list[tuple[str, dict[str, Any]]] = []

    def kill_a_trainer(job: Job) -> None:
        hosts.extend(host_of(job, node) for node in ("n0", "n1"))
        os.kill(trainer_of(job, "n1"), signal.SIGKILL)

    def kill_a_host_and_its_trainers_client(job: Job) -> None:
        assert [host_of(job, node) for node in ("n0", "n1")] == hosts, "they forked again"
        os.kill(hosts[0], signal.SIGKILL)
        os.kill(job.supervisor.trainers.pids()[0], signal.SIGKILL)

    def lose_a_node(job: Job) -> None:
        assert host_of(job, "n0") != hosts[0] and host_of(job, "n1") == hosts[1]
        noted = [noted_on(job, node) for node in ("n0", "n2")]
        assert noted[0] == noted[1] and "torch.nn.parallel.distributed" in noted[0]
        job.cluster.kill_node("n1")

    def look_at_the_spare(job: Job) -> None:
        hosts.append(host_of(job, "n2"))
        shown.extend(status.collect(job.cluster.root, job.name).items())

    job.run(
        (6, kill_a_trainer),
        (14, once_recovered(1, kill_a_host_and_its_trainers_client)),
        (22, once_recovered(2, lose_a_node)),
        (30, once_recovered(3, look_at_the_spare)),
    )
    assert not difference(job.result(), two), job.story()
    assert [source for _, source in job.restores()] == ["own memory"] * 2 + ["parity"], job.story()
    assert len(hosts) == 3 and "cold_start" not in job.kinds()
    recoveries = [event for event in job.events if event.kind == "recovered"]
    assert [event.fields["starts"] for event in recoveries] == [{"warm": [0, 1]}] * 3, job.story()
    ((name, seen),) = shown
    (line,) = (x for x in status.render(name, seen).splitlines() if x.startswith("last restart"))
    assert line.endswith("restart of ranks: 0-1 warm")


@pytest.mark.all_layouts
def test_a_command_that_cannot_be_forked_starts_cold_and_says_so_once(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, own_hosts=True)
    made.append(job)
    job.command = ("/usr/bin/env", *job.training_command())
    job.run()
    assert not difference(job.result(), two), job.story()
    (said,) = [event.text for event in job.events if event.kind == "cold_start"]
    assert said == "trainers import anew at each start: /usr/bin/env is not a Python interpreter"
