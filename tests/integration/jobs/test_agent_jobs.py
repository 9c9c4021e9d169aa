"""Jobs on nodes with agents: the launchers that start them are real ones."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.process_tools import free_port
from tests.programs.faulty_example import GATE
from tests.support.agent_jobs import AgentJob
from tests.support.jobs import FAULTY, TORCHRUN, Result, difference
from tests.support.networks import needs_network
from tests.support.node_network import HOST, NodeNetwork

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]
ITERATIONS = 24
# Of this interpreter's environment, before those on PATH.
BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AgentJob]:
    made = AgentJob(tmp_path, ITERATIONS)
    yield made
    made.destroy()


def program(name: str) -> str:
    found = shutil.which(name, path=BESIDE)
    assert found, f"no {name} beside {sys.executable} or on PATH"
    return found


def test_mpirun_starts_the_same_command_once_per_node(
    job: AgentJob, two: Result, tmp_path: Path
) -> None:
    """A trainer is killed on the way; all that mpirun started ends with the job's code."""
    gate, job.script[0] = tmp_path / "gate", str(FAULTY)
    name = "n${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    command = " ".join(job.warm_command("--launcher", "nodes", "--node-name", name))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", GATE: str(gate)}
    job.begin([program("mpirun"), "-n", "2", "sh", "-c", command], root)
    job.until_printed("committed (protected)")
    os.kill(job.trainer(1), signal.SIGKILL)
    gate.touch()
    assert job.end() == [0], job.story()
    assert "rank 1 on n1 was killed by signal 9" in job.text(), job.story()
    assert not list((job.folder / "state").glob("*.nodes")), "notes for agents are left"
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
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
        job.begin(job.warm_command(*flags), dict(zip(names, ("eth0", subnet, subnet), strict=True)))
        job.until_printed("(protected)")
        job.until_iteration(8)
        job.lose_node("n1")
        assert job.end() == [0], job.story()
    assert "n2 takes the place of n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


def begin_by_operator(job: AgentJob, nodes: int, *flags: str) -> None:
    """By anybody, with variables as Kubernetes' operator for PyTorch sets them."""
    for rank in range(nodes):
        place = {"RANK": str(rank), "WORLD_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1"}
        job.begin(on_node(job, rank, *flags), place | marks_of(job, rank))


def begin_torchruns(job: AgentJob, nodes: int, *flags: str) -> None:
    """One torchrun on each node, as its documentation says."""
    port = str(free_port())
    for rank in range(nodes):
        words = ["-m", TORCHRUN, "--nnodes", str(nodes), "--node-rank", str(rank)]
        words += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
        run = on_node(job, rank, *flags)[2:]
        job.begin([sys.executable, *words, "-m", *run], marks_of(job, rank))


def begin_deepspeeds(job: AgentJob, nodes: int, *flags: str) -> None:
    """What ``deepspeed --hostfile F --num_gpus 1 --no_local_rank`` starts on each node."""
    port, hosts = str(free_port()), {f"n{rank}": [0] for rank in range(nodes)}
    info = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    for rank in range(nodes):
        words = ["-m", "deepspeed.launcher.launch", f"--world_info={info}", f"--node_rank={rank}"]
        words += ["--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank", "--module"]
        run = on_node(job, rank, *flags)[2:]
        job.begin([sys.executable, *words, *run], {"DS_ACCELERATOR": "cpu"})


def on_node(job: AgentJob, rank: int, *flags: str) -> list[str]:
    return job.command("--launcher", "nodes", "--node-name", f"n{rank}", *flags)


def marks_of(job: AgentJob, rank: int) -> dict[str, str]:
    """By which all processes of a node are found when it is lost."""
    return {JOB: job.name, NODE: f"n{rank}"}


@pytest.mark.all_layouts
@pytest.mark.parametrize("begin", [begin_by_operator, begin_torchruns])
def test_a_node_is_lost_and_a_spare_takes_its_place(
    job: AgentJob, two: Result, begin: Callable[..., None]
) -> None:
    begin(job, 3, "--spares", "1")
    job.until_iteration(8)
    job.lose_node("n1")
    # A torchrun waits for a lost one for five minutes when its own work is done.
    job.until_printed("training finished")
    if begin is begin_by_operator:
        assert job.end() == [0, -signal.SIGKILL, 0], job.story()
    assert "n2 takes the place of n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
@pytest.mark.parametrize("begin", [begin_torchruns, begin_deepspeeds])
def test_launchers_of_trainers_start_it_once_per_node(
    job: AgentJob, two: Result, begin: Callable[..., None]
) -> None:
    begin(job, 2)
    job.until_iteration(8)
    os.kill(job.trainer(1), signal.SIGKILL)
    assert job.end() == [0, 0], job.story()
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_memory_outlives_a_launcher_that_ends_process_trees(job: AgentJob, two: Result) -> None:
    """SIGTERM to DeepSpeed's launchers; the same command again finds the snapshots."""
    begin_deepspeeds(job, 2)
    job.until_printed("(protected)")
    job.until_iteration(8)
    smps = job.smps()
    assert len(smps) == 2, job.story()
    for process in job.started:
        process.send_signal(signal.SIGTERM)
    assert all(job.end()), job.story()
    assert job.smps() == smps
    job.started.clear()
    begin_deepspeeds(job, 2)
    assert job.end() == [0, 0], job.story()
    assert "own memory" in job.text(), job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_torchrun_may_be_what_agents_start(job: AgentJob, two: Result) -> None:
    """One is killed; its rank, in a session of its own, does not notice and is ended with it."""
    torchrun = [sys.executable, "-m", TORCHRUN, "--nproc-per-node", "1", *job.script]
    for rank in range(2):
        flags = ["--launcher", "nodes", "--node-name", f"n{rank}"]
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        job.begin(job.command(*flags, training=torchrun), place)
    job.until_iteration(8)
    orphan = job.trainer(1)
    status = Path(f"/proc/{orphan}/status").read_text().split()
    os.kill(orphan, signal.SIGSTOP)
    os.kill(int(status[status.index("PPid:") + 1]), signal.SIGKILL)
    assert job.end() == [0, 0], job.story()
    assert "rank 1 on n1 was killed by signal 9" in job.text(), job.story()
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), two), job.story()
