"""The alarm of exposure rings once when a loss would cost too much, and once when it is over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.supervisor.exposure_alarm import ExposureAlarm, lost_iterations


def status(iteration: int, node_loss: int, **more: Any) -> dict[str, Any]:
    """The status of a job that takes a snapshot every 10 iterations of one second."""
    quiet = {"paused": [], "skipping_for": "", "given_up": 0, "given_up_reason": ""}
    found = {"iteration": iteration, "interval": 10, "encoders": "up", "durable": None}
    falls = {"crash": iteration, "any_node": {"iteration": node_loss}, "some_nodes": []}
    return {**quiet, **found, **falls, "watch": {"iteration_seconds": 1.0}, **more}


def kinds(alarm: ExposureAlarm, *seen: dict[str, Any]) -> list[str]:
    rings = (alarm.poll(float(now), one) for now, one in enumerate(seen))
    return [ring.kind for ring in rings if ring is not None]


def test_each_crossing_rings_once() -> None:
    alarm = ExposureAlarm(20, parity=True)
    seen = [status(now, 0) for now in range(18, 25)] + [status(25, 20), status(30, 20)]
    assert kinds(alarm, *seen) == ["exposed", "protected_again"]


def test_without_a_limit_four_intervals_and_some_seconds_count() -> None:
    assert not kinds(ExposureAlarm(0, parity=True), status(40, 0))
    assert kinds(ExposureAlarm(0, parity=True), status(41, 0)) == ["exposed"]
    assert not kinds(ExposureAlarm(0, parity=True), status(41, 0, watch={"iteration_seconds": 0.1}))


def test_without_parity_the_loss_of_a_trainer_counts() -> None:
    assert not kinds(ExposureAlarm(5, parity=False), status(100, -1))
    assert kinds(ExposureAlarm(5, parity=False), status(100, -1, crash=90)) == ["exposed"]


def test_a_job_that_does_not_train_rings_nothing() -> None:
    alarm = ExposureAlarm(5, parity=True)
    assert kinds(alarm, status(100, 0), status(-1, -1), status(101, 0)) == ["exposed"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"paused": ["n0"]}, "paused"),
        ({"skipping_for": "a reader holds one"}, "skipped: a reader holds one"),
        ({"given_up": 3, "given_up_reason": "no parity after 60 s"}, "no parity after 60 s"),
        ({"encoders": "down"}, "no encoder is running"),
        ({}, "no newer snapshot was committed"),
    ],
)
def test_the_reason_is_named(more: dict[str, Any], reason: str) -> None:
    ring = ExposureAlarm(5, parity=True).poll(0.0, status(100, 0, **more))
    assert ring is not None
    assert "would cost 100 iterations (100 s): " in ring.text
    assert reason in ring.text


def test_a_checkpoint_on_disk_counts_as_in_the_status() -> None:
    lost = lost_iterations(status(50, 40, crash=None, durable={"iteration": 30}))
    assert lost == {"trainer": 20, "node": 10, "worst_node": 10}


def test_a_job_without_stripes_costs_nothing_that_is_known() -> None:
    assert not lost_iterations({"iteration": 7})


@given(crash=st.integers(-1, 50), node=st.integers(-1, 50), some=st.lists(st.integers(-1, 50)))
def test_no_node_costs_more_than_the_worst(crash: int, node: int, some: list[int]) -> None:
    nodes = [{"iteration": one} for one in some]
    lost = lost_iterations(status(50, node, crash=crash, some_nodes=nodes))
    assert lost["worst_node"] == max([lost["node"], *(50 - max(one, 0) for one in some)])
    assert lost["trainer"] == 50 - max(crash, 0)
