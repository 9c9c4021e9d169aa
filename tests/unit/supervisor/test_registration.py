"""Ranks that do not register in time: who, and what their user can do."""

from __future__ import annotations

import asyncio
import re

import pytest

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import ControlPlaneError, LayoutMismatchError, StateMismatchError
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


@pytest.mark.parametrize(
    "error, other", [(LayoutMismatchError, True), (StateMismatchError, False)], ids=str
)
def test_dtypes_of_a_state_are_no_other_parallel_layout(
    error: type[Exception], other: bool
) -> None:
    """A reshape could not help, so the job ends at once with the rank's own words."""
    ranks, reason = Registration(1), "optimizer/state/0/step is bfloat16[]"
    ranks.hellos["dp0"] = ("n0", m.Hello(7, 0, 0, "dp0", (), 1))
    ranks.unfit = m.Unfit("dp0", error.__name__, reason)
    stored = StripeState("none", 1, 0, 4096, ("dp0",), 4096)
    assert ranks.other_layout([stored]) is other
    with pytest.raises(error, match=re.escape(reason)):
        ranks.check_fit()
