"""Jobs over a real ssh: our own hostfile, and the program ``deepspeed`` with pdsh."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ssh_nodes
from tests.support.agent_jobs import AgentJob
from tests.support.jobs import ROOT, Uninterrupted, difference
from tests.support.networks import needs_network
from tests.support.node_network import HOST, NodeNetwork

ITERATIONS = 24
MISSING = ssh_nodes.missing()

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.all_layouts,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("warm_trainers"),
    needs_network,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AgentJob]:
    made = AgentJob(tmp_path, ITERATIONS, 0.3)
    yield made
    made.destroy()


def variables(network: NodeNetwork) -> dict[str, str]:
    """What tells a job which network to use."""
    subnet = network.address(HOST).rpartition(".")[0] + ".0/24"
    names = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include")
    return dict(zip(names, ("eth0", subnet, subnet), strict=True))


def search_path(folder: Path) -> dict[str, str]:
    own = Path(sys.executable).parent
    return {"PATH": os.pathsep.join([str(folder), str(own), os.environ["PATH"]])}


def test_a_hostfile_is_reached_by_ssh_itself(
    job: AgentJob, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """All of a node is killed, its sshd too."""
    nodes = ["n0", "n1", "n2"]
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{node} slots=1\n" for node in nodes))
    with NodeNetwork(job.name, nodes) as network:
        more = {"PYTHONPATH": str(ROOT)}
        with ssh_nodes.serving(network, tmp_path / "ssh", more) as folder:
            flags = ["--launcher", "hostfile", "--hostfile", str(hosts), "--spares", "1"]
            flags += ["--address", network.address(HOST)]
            job.begin(job.warm_command(*flags), variables(network) | search_path(folder))
            job.until_printed("(protected)")
            job.until_iteration(8)
            ssh_nodes.lose(network, "n1")
            job.lose_node("n1")
            assert job.end() == [0], job.story()
    assert "n2 takes the place of n1" in job.text(), job.story()
    assert "from parity" in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()


@pytest.mark.deepspeed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_the_program_deepspeed_starts_it_on_all_hosts(
    job: AgentJob, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """As docs/how-to/launchers.md says; nodes are known by their host names."""
    nodes = ["n0", "n1"]
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{node} slots=1\n" for node in nodes))
    with NodeNetwork(job.name, nodes) as network:
        more = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with ssh_nodes.serving(network, tmp_path / "ssh", more | variables(network)) as folder:
            words = ["-m", "deepspeed.launcher.runner", "--hostfile", str(hosts), "--num_gpus", "1"]
            words += ["--no_local_rank", "--master_addr", network.address("n0"), "--module"]
            run = job.warm_command("--launcher", "nodes")[2:]
            more |= search_path(folder)
            job.begin([sys.executable, *words, *run], more)
            job.until_printed("(protected)")
            job.until_iteration(8)
            os.kill(job.trainer(1), signal.SIGKILL)
            assert job.end() == [0], job.story()
    assert "rank 1 on n1 was killed by signal 9" in job.text(), job.story()
    assert "from own memory; " in job.text(), job.story()
    assert not difference(job.result(), uninterrupted(2, ITERATIONS)), job.story()
