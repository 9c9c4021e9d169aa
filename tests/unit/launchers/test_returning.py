"""Hosts that come back by themselves: which are waited for, and when they are there."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_ft.cli import run, run_place
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.launchers.launcher import ReturningHosts
from megatron_ft.launchers.virtual import VirtualCluster


def test_a_lost_node_is_waited_for_and_reported_once(tmp_path: Path) -> None:
    cluster = VirtualCluster("job", ["n0", "n1"], tmp_path)
    hosts = ReturningHosts(cluster, 5.0)
    with pytest.raises(ControlPlaneError, match="0 nodes are known to be away, not 1"):
        hosts.request(1)
    cluster.kill_node("n1")
    assert hosts.request(1) == "n1 again" and hosts.arrived() == []
    cluster.revive("n1")
    assert hosts.arrived() == ["n1"] and hosts.arrived() == []


@pytest.mark.parametrize("policy", ["stop", "shrink", "auto"])
def test_only_a_job_that_chooses_its_way_waits_for_them(tmp_path: Path, policy: str) -> None:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    arguments = parser.parse_args(["--job", "job", "--hold-seconds", "7", "--", "true"])
    place = run_place.place_of(arguments, tmp_path / "root", tmp_path, tmp_path, policy)
    assert (place.hosts is not None and place.hosts.seconds == 7) == (policy == "auto")
