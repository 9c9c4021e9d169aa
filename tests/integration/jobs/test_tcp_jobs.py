"""Whole jobs whose encoders use TCP: no MPI to be found, and a network that is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ft.supervisor.orders import Timing
from tests.support.fates import of_node
from tests.support.jobs import Job, Result, difference
from tests.support.networks import needs_network
from tests.support.node_network import HOST

pytestmark = pytest.mark.usefixtures("warm_trainers")

ITERATIONS = 24


def require_tcp(job: Job, why: str) -> None:
    """Said in the log, and true: no encoder has MPI loaded."""
    said = [event.text for event in job.events if event.kind == "transport"]
    assert len(said) == 1 and "TCP, encrypted and authenticated" in said[0], job.story()
    assert why in said[0]


def test_without_mpi_a_lost_node_is_rebuilt_over_tcp(
    made: list[Job], tmp_path: Path, two: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden" / "mpi4py"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open')")
    path = [str(hidden.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    job = Job(tmp_path, nodes=2, spares=1, iterations=ITERATIONS, iteration_seconds=0.15)
    made.append(job)

    def lose_second(job: Job) -> None:
        (encoder,) = of_node(job, "n0", "erasure.worker")
        assert "libmpi" not in Path(f"/proc/{encoder}/maps").read_text()
        job.cluster.kill_node("n1")

    job.run((6, lose_second))
    require_tcp(job, "libmpi.so.40: cannot open")
    assert not difference(job.result(), two), job.story()
    assert [source for _, source in job.restores()] == ["parity"], job.story()
    assert not list((tmp_path / "logs").glob("encoders.log.*"))


@needs_network
@pytest.mark.all_layouts
def test_over_tcp_a_node_that_is_cut_off_is_rebuilt(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Encoders reach each other, and the supervisor them, by the nodes' own addresses."""
    job = Job(
        tmp_path, nodes=2, spares=1, networked=True, iterations=ITERATIONS, transport="tcp",
        timing=Timing(heartbeat=0.25, lease=3.0, node_timeout=4.0), iteration_seconds=0.15,
    )  # fmt: skip
    made.append(job)

    def cut(job: Job) -> None:
        assert job.network is not None
        job.network.cut(["n1"], ["n0", "n2", HOST])

    job.run((8, cut))
    require_tcp(job, "--transport asks for it")
    assert job.supervisor.members.active == ["n0", "n2"], job.story()
    assert not difference(job.result(), two), job.story()
    assert [source for _, source in job.restores()] == ["parity"], job.story()
