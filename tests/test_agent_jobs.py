"""Jobs on nodes with agents: the launchers that start them are real ones."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.environment import JOB, NODE
from megatron_ft.launch.trainer_env import free_port
from megatron_ft.launch.virtual_network import HOST
from megatron_ft.testing.network import NodeNetwork
from tests.agent_jobs import AgentJob
from tests.jobs import TORCHRUN, Result, difference, oracle
from tests.networks import needs_network

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]
ITERATIONS = 24
# Of this interpreter's environment, before those on PATH.
BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return oracle(tmp_path_factory.mktemp("oracle2"), 2, ITERATIONS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AgentJob]:
    made = AgentJob(tmp_path, ITERATIONS)
    yield made
    made.destroy()


def program(name: str) -> str:
    found = shutil.which(name, path=BESIDE)
    assert found, f"no {name} beside {sys.executable} or on PATH"
    return found


def test_mpirun_starts_the_same_command_once_per_node(job: AgentJob, two: Result) -> None:
    """A trainer is killed on the way; all that mpirun started ends with the job's code."""
    name = "n${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    command = " ".join(job.command("--launcher", "nodes", "--node-name", name))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    job.begin([program("mpirun"), "-n", "2", "sh", "-c", command], root)
    job.until_iteration(8)
    os.kill(job.trainer(1), signal.SIGKILL)
    assert job.end() == [0], job.story()
    assert "rank 1 on n1 was killed by signal 9" in job.text(), job.story()
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@needs_network
def test_a_hostfile_and_a_remote_shell_reach_all_nodes(
    job: AgentJob, tmp_path: Path, two: Result
) -> None:
    """Each node has a network, a host name, and no process in common with another."""
    nodes = ["n0", "n1", "n2"]
    hosts = tmp_path / "hosts"
    hosts.write_text("# spares come last\nn0 slots=1\nn1 slots=1\n\nn2 slots=1 # spare\n")
    with NodeNetwork(job.name, nodes) as network:
        shell = tmp_path / "shell"
        cases = "".join(f"{n}) net={network.namespace_path(n)};;\n" for n in nodes)
        marks = f"export {JOB}={job.name} {NODE}=$node"
        shell.write_text(
            f'#!/bin/sh\nnode=$1\nshift\ncase "$node" in\n{cases}esac\n{marks}\n'
            'exec nsenter --net="$net" -- unshare --uts -- sh -c "hostname $node; $*"\n'
        )
        shell.chmod(0o700)
        subnet = network.address(HOST).rpartition(".")[0] + ".0/24"
        flags = ["--launcher", "hostfile", "--hostfile", str(hosts), "--spares", "1"]
        flags += ["--remote-shell", str(shell), "--address", network.address(HOST)]
        names = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include")
        job.begin(job.command(*flags), dict(zip(names, ("eth0", subnet, subnet), strict=True)))
        job.until_printed("(protected)")
        job.until_iteration(8)
        job.lose_node("n1")
        assert job.end() == [0], job.story()
    assert "n2 takes the place of n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_a_node_of_an_operator_is_lost_and_a_spare_takes_its_place(
    job: AgentJob, two: Result
) -> None:
    """Once per node by anybody, with variables as Kubernetes' operator for PyTorch sets them."""
    fronts = [
        job.begin(
            job.command("--launcher", "nodes", "--spares", "1", "--node-name", f"n{rank}"),
            {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(3)
    ]
    job.until_iteration(8)
    job.lose_node("n1", fronts[1])
    assert job.end() == [0, -signal.SIGKILL, 0], job.story()
    assert "n2 takes the place of n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


def begin_torchrun(job: AgentJob) -> None:
    """One torchrun on each of two nodes, as its documentation says."""
    port = str(free_port())
    for rank in range(2):
        words = ["-m", TORCHRUN, "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, "-m"]
        run = job.command("--launcher", "nodes", "--node-name", f"n{rank}")
        job.begin([sys.executable, *words, *run[2:]])


def begin_deepspeed(job: AgentJob) -> None:
    """What ``deepspeed --hostfile F --num_gpus 1 --no_local_rank`` starts on each of two nodes."""
    port, info = str(free_port()), base64.urlsafe_b64encode(b'{"n0": [0], "n1": [0]}').decode()
    for rank in range(2):
        words = ["-m", "deepspeed.launcher.launch", f"--world_info={info}", f"--node_rank={rank}"]
        words += ["--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank", "--module"]
        run = job.command("--launcher", "nodes", "--node-name", f"n{rank}")
        job.begin([sys.executable, *words, *run[2:]], {"DS_ACCELERATOR": "cpu"})


@pytest.mark.all_layouts
@pytest.mark.parametrize("begin", [begin_torchrun, begin_deepspeed])
def test_launchers_of_trainers_start_it_once_per_node(
    job: AgentJob, two: Result, begin: Callable[[AgentJob], None]
) -> None:
    begin(job)
    job.until_iteration(8)
    os.kill(job.trainer(1), signal.SIGKILL)
    assert job.end() == [0, 0], job.story()
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_memory_outlives_a_launcher_that_ends_process_trees(job: AgentJob, two: Result) -> None:
    """SIGTERM to DeepSpeed's launchers; the same command again finds the snapshots."""
    begin_deepspeed(job)
    job.until_printed("(protected)")
    job.until_iteration(8)
    smps = job.smps()
    assert len(smps) == 2, job.story()
    for process in job.started:
        process.send_signal(signal.SIGTERM)
    assert all(job.end()), job.story()
    assert job.smps() == smps
    job.started.clear()
    begin_deepspeed(job)
    assert job.end() == [0, 0], job.story()
    assert "own memory" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()
