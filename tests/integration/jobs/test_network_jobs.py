"""Jobs whose network is cut or slow, against the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.orders import Timing
from tests.support.fates import Deaths, in_incarnation, of_node, when
from tests.support.jobs import Fault, Job, Result, difference
from tests.support.namespaces import enter_namespace
from tests.support.networks import needs_network
from tests.support.node_network import HOST, NodeNetwork

pytestmark = [needs_network, pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

TIMING = Timing(heartbeat=0.25, lease=3.0, node_timeout=4.0)
ITERATIONS = 30


@pytest.fixture
def new(made: list[Job], tmp_path: Path) -> Callable[..., Job]:
    def make(**settings: object) -> Job:
        standard = {"nodes": 2, "networked": True, "timing": TIMING, "iterations": ITERATIONS}
        standard |= {"iteration_seconds": 0.15}
        job = Job(tmp_path, **{**standard, **settings})  # type: ignore[arg-type]
        made.append(job)
        return job

    return make


def network_of(job: Job) -> NodeNetwork:
    assert job.network is not None
    return job.network


def cut(deaths: Deaths, rank: int, *sides: list[str], one_way: bool = False) -> Fault:
    """Cut one side from another; the writers on the node of ``rank`` are watched."""

    def strike(job: Job) -> None:
        deaths.watch(job.trainers()[rank])
        deaths.watch(*of_node(job, job.supervisor.members.active[rank], "erasure.worker"))
        network_of(job).cut(*sides, one_way=one_way)

    return strike


def heal(job: Job) -> None:
    network_of(job).heal()


def heal_and_lose_another(job: Job) -> None:
    heal(job)
    job.cluster.kill_node("n0")


@pytest.mark.all_layouts
def test_a_slow_link_is_waited_for(new: Callable[..., Job], two: Result) -> None:
    def slow(job: Job) -> None:
        network_of(job).delay("n1", 50)
        network_of(job).limit("n1", 50)

    job = new()
    job.run((6, slow))
    assert not difference(job.result(), two), job.story()
    assert job.kinds().count("trainers_started") == 1, job.story()


def test_the_side_that_is_cut_off_stops_before_the_other_goes_on(
    new: Callable[..., Job], two: Result
) -> None:
    """Healed later it comes back as a spare, and its old arenas count for nothing."""
    job, deaths = new(spares=1), Deaths()
    job.run((8, cut(deaths, 1, ["n1"])), (20, in_incarnation(2, heal_and_lose_another)))
    assert max(deaths.all()) < when(job, "trainers_started", 1), job.story()
    assert "lease has run out: killing" in (job.folder / "logs" / "smp-n1.log").read_text()
    assert job.supervisor.members.active == ["n1", "n2"], job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
@pytest.mark.parametrize("deaf", [False, True], ids=["is not heard", "does not hear"])
def test_a_node_cut_in_one_direction_stops_in_time(
    new: Callable[..., Job], two: Result, deaf: bool
) -> None:
    job, deaths = new(spares=1), Deaths()
    sides = ([HOST], ["n1"]) if deaf else (["n1"], [HOST])
    job.run((8, cut(deaths, 1, *sides, one_way=True)))
    assert max(deaths.all()) < when(job, "trainers_started", 1), job.story()
    assert job.supervisor.members.active == ["n0", "n2"], job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_half_of_the_nodes_is_cut_off_with_the_first(new: Callable[..., Job], two: Result) -> None:
    job, deaths = new(spares=2), Deaths()
    job.run((8, cut(deaths, 0, ["n0", "n2"], ["n1", "n3", HOST])), (20, in_incarnation(2, heal)))
    assert max(deaths.all()) < when(job, "trainers_started", 1), job.story()
    assert job.supervisor.members.active == ["n3", "n1"], job.story()
    assert not difference(job.result(), two), job.story()


@pytest.mark.all_layouts
def test_a_supervisor_that_is_cut_off_with_its_node_stops_and_another_goes_on(
    new: Callable[..., Job], two: Result
) -> None:
    job, deaths = new(spares=1, place="n0"), Deaths()
    with pytest.raises(NoSpareError, match="n1"), at_place(job):
        job.run((8, cut(deaths, 1, ["n0"])))
    first = len(job.events)
    job.cluster.move_supervisor(HOST)
    job.run()
    assert max(deaths.all()) < when(job, "trainers_started", 1), job.story()
    assert "waiting" in [event.kind for event in job.events[first:]], job.story()
    assert job.supervisor.members.active == ["n2", "n1"], job.story()
    assert not difference(job.result(), two), job.story()


@contextmanager
def at_place(job: Job) -> Iterator[None]:
    """This thread, in which the supervisor runs, is where the cluster says."""
    network = network_of(job)
    enter_namespace(network.namespace_path(job.place))
    try:
        yield
    finally:
        enter_namespace(network.namespace_path(HOST))


@pytest.mark.all_layouts
def test_a_cut_that_is_shorter_than_the_lease_restarts_nobody(
    new: Callable[..., Job], two: Result
) -> None:
    def blink(job: Job) -> None:
        network_of(job).cut("n1")
        time.sleep(TIMING.lease / 4)
        network_of(job).heal()

    job = new()
    job.run((8, blink))
    assert job.kinds().count("trainers_started") == 1, job.story()
    assert not difference(job.result(), two), job.story()
