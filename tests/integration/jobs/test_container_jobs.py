"""Whole jobs with containers of podman: of trainers alone, and of nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, TREE
from tests.support import containers
from tests.support.agent_jobs import AgentJob
from tests.support.jobs import Uninterrupted, difference
from tests.support.networks import needs_network
from tests.support.node_network import HOST, NodeNetwork

ITERATIONS = 24
REAPER = "sleep 900 & wait"
"""As the first process it buries those of whose parents nothing is left."""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.all_layouts,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("containers_here", "warm_trainers"),
]


@pytest.fixture(scope="module")
def containers_here() -> None:
    if reason := containers.missing():
        pytest.skip(reason)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AgentJob]:
    # Begun before encoders are there, training would be over before they are.
    made = AgentJob(tmp_path, ITERATIONS, 0.5)
    yield made
    made.destroy()


def containers_left() -> list[str]:
    said = subprocess.run(["podman", "ps", "--all", "--quiet"], capture_output=True, check=True)
    return said.stdout.decode().split()


def begin_with_trainers_in_containers(job: AgentJob, root: Path) -> None:
    shared = ["--network=host", "--ipc=host", "--pid=host"]
    given = ["--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS"]
    inside = containers.client("--rm", *shared, *given, "--rootfs", str(root))
    job.begin(job.command("--nodes", "2", training=[*inside, *job.training]))


def test_trainers_in_containers_and_all_else_on_the_host(
    job: AgentJob, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """One is killed, then the client of another: its container must not train on."""
    before = containers_left()
    begin_with_trainers_in_containers(job, containers.root_in(tmp_path))
    job.until_printed("committed (protected)")
    first = rank_of(job, 1, in_container=True)
    assert os.stat(f"/proc/{first}/ns/mnt").st_ino != os.stat("/proc/self/ns/mnt").st_ino
    assert all(
        os.stat(f"/proc/{smp}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
        for smp in job.smps()
    )
    os.kill(first, signal.SIGKILL)
    job.until_printed("training\n", times=2)
    orphan = rank_of(job, 0, in_container=True)
    os.kill(rank_of(job, 0, in_container=False), signal.SIGKILL)
    job.until_printed("trainers started", times=3)
    assert procfs.read_stat(orphan) is None
    assert job.end() == [0], job.story()
    assert "rank 1 on node1 exited with 137" in job.text(), job.story()
    assert job.text().count("from own memory; ") == 2, job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
    deadline = time.monotonic() + 30
    while containers_left() != before:
        assert time.monotonic() < deadline, f"containers are left: {containers_left()}"
        time.sleep(0.2)


def rank_of(job: AgentJob, rank: int, in_container: bool) -> int:
    """A trainer in its container, or the ``podman run`` that started it."""
    found = [
        pid
        for pid in procfs.own_processes()
        if (env := procfs.read_environment(pid)).get(JOB) == job.name
        and env.get("RANK") == str(rank)
        and (TREE in env) == in_container
    ]
    assert len(found) == 1, (found, job.story())
    return found[0]


@needs_network
def test_nodes_that_are_containers(
    job: AgentJob, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """Each has its own network, process numbers, host name and memory; n1 is lost."""
    nodes = ["n0", "n1", "n2"]
    prefix = f"mft-{uuid.uuid4().hex[:4]}"
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{prefix}-{node}\n" for node in nodes))
    root = containers.root_in(tmp_path)
    with NodeNetwork(job.name, nodes) as network, ExitStack() as made:
        for node in nodes:
            name = f"{prefix}-{node}"
            place = [f"--network=ns:{network.namespace_path(node)}", f"--hostname={name}"]
            place += ["--shm-size=256m", "--env", "PYTHONPATH", f"--name={name}"]
            start = containers.client("--detach", *place, "--rootfs", str(root))
            subprocess.run([*start, "sh", "-c", REAPER], check=True, capture_output=True)
            remove = ["podman", "rm", "--force", "--time=0", name]
            made.callback(subprocess.run, remove, check=True, capture_output=True)
        subnet = network.address(HOST).rpartition(".")[0] + ".0/24"
        flags = ["--launcher", "hostfile", "--hostfile", str(hosts), "--spares", "1"]
        flags += ["--remote-shell", "podman exec -i", "--address", network.address(HOST)]
        names = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include")
        job.begin(job.command(*flags), dict(zip(names, ("eth0", subnet, subnet), strict=True)))
        job.until_printed("(protected)")
        job.until_iteration(8)
        subprocess.run(["podman", "kill", f"{prefix}-n1"], check=True, capture_output=True)
        assert job.end() == [0], job.story()
    assert f"{prefix}-n2 takes the place of {prefix}-n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.parametrize(
    ("flags", "verdicts", "advice"),
    [
        ([], ("refused", "refused"), "--ipc host"),
        (["--ipc=host"], ("ok", "refused"), "--pid host"),
        (["--ipc=host", "--pid=host"], ("ok", "ok"), ""),
        (["--volume=/dev/shm:/dev/shm", "--pid=host"], ("ok", "ok"), ""),
    ],
)
def test_doctor_proves_what_a_container_sees(
    tmp_path: Path, flags: list[str], verdicts: tuple[str, str], advice: str
) -> None:
    root = containers.root_in(tmp_path)
    inside = containers.client("--rm", "--network=host", *flags, "--rootfs", str(root))
    words = [sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json", "--nodes", "2"]
    words += ["--protect", "xor:2", "--transport", "tcp"]
    words += ["--state-dir", str(tmp_path / "state"), "--", *inside, sys.executable, "train.py"]
    said = subprocess.run(words, stdout=subprocess.PIPE, timeout=200, check=False).stdout
    found = {f["check"]: f for f in json.loads(said)["findings"]}
    checks = found["same arena"], found["containers"]
    assert tuple(f["verdict"] for f in checks) == verdicts, checks
    assert advice in checks[0]["advice"] + checks[1]["advice"]
