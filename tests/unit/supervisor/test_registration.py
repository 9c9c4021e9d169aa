"""Ranks that do not register in time: who, and what their user can do."""

from __future__ import annotations

import asyncio

import pytest

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.registration import Registration


def missing(ranks: Registration) -> str:
    with pytest.raises(ControlPlaneError) as caught:
        asyncio.run(ranks.wait(0.0))
    return str(caught.value)


def test_a_command_of_which_nobody_registers_is_asked_for_snapshots() -> None:
    said = missing(Registration(2))
    assert "no rank has registered" in said
    for way in ("--inmem-snapshot", '"inmem_snapshot"', "SnapshotManager", "--register-timeout"):
        assert way in said


def test_ranks_that_are_late_are_named() -> None:
    ranks = Registration(3)
    ranks.hellos["dp1"] = ("n1", m.Hello(7, 1, 0, "dp1", (), 1))
    assert ranks.starts() == {"cold": [1]}
    said = missing(ranks)
    assert "ranks [0, 1, 2] have not registered" in said and "--inmem-snapshot" not in said
