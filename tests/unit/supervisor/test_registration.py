"""Ranks that do not register in time: who, and what their user can do."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import (
    ControlPlaneError,
    LayoutMismatchError,
    MegatronFTError,
    StateMismatchError,
)
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.registration import Registration


def missing(ranks: Registration) -> str:
    with pytest.raises(ControlPlaneError) as caught:
        asyncio.run(ranks.wait(0.0, lambda _: None))
    return str(caught.value)


def late(ranks: Registration, timeout: float = 0.2) -> list[str]:
    """What is said before the time is over, at which the last rank comes."""
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        assert ranks.late == text
        for rank in range(ranks.world_size):
            ranks.on_event(event(m.Hello(7, rank, 0, f"dp{rank}", (), 1)))
            ranks.on_event(event(m.Prepare(f"dp{rank}", 128, 1)))

    asyncio.run(ranks.wait(timeout, warn))
    assert ranks.late == ""
    return said


def event(body: Any) -> m.NodeEvent:
    return m.NodeEvent("n0", 1, body)


def test_ranks_that_may_train_without_a_word_are_named_once_before_the_time_is_over() -> None:
    (said,) = late(Registration(2))
    assert "nothing is protected" in said and "no rank has registered" in said
    for way in ("--inmem-snapshot", '"inmem_snapshot"', "transformers.Trainer", "SnapshotManager"):
        assert way in said


def test_of_ranks_that_are_late_those_that_have_come_are_told_apart() -> None:
    ranks = Registration(3)
    for body in (m.Hello(7, 0, 0, "dp0", (), 1), m.Prepare("dp0", 128, 1)):
        ranks.on_event(event(body))
    ranks.on_event(event(m.Hello(7, 2, 0, "dp2", (), 1)))
    (said,) = late(ranks)
    assert "ranks [1, 2] of the job have not" in said
    assert "ranks [2] are connected and have not saved yet" in said


def test_ranks_that_come_in_time_are_not_named() -> None:
    ranks = Registration(1)
    for body in (m.Hello(7, 0, 0, "dp0", (), 1), m.Prepare("dp0", 128, 1)):
        ranks.on_event(event(body))
    assert late(ranks, 10.0) == []


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
    error: type[MegatronFTError], other: bool
) -> None:
    """A reshape could not help, so the job ends at once with the rank's own words."""
    ranks, reason = Registration(1), "optimizer/state/0/step is bfloat16[]"
    ranks.hellos["dp0"] = ("n0", m.Hello(7, 0, 0, "dp0", (), 1))
    ranks.unfit = m.Unfit("dp0", error(reason))
    stored = StripeState("none", 1, 0, 4096, ("dp0",), 4096)
    assert ranks.other_layout([stored]) is other
    with pytest.raises(error, match=re.escape(reason)):
        ranks.check_fit()
