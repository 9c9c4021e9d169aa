"""The loss gate: which losses pass, and what a rank does with a permit after one that does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.capture import HISTORY, LEAST_HISTORY, LossGate
from tests.support.captures import FakeSmp, capture, make_manager
from tests.support.small_training import make_training

losses = st.floats(0.1, 1.0)


def judged(gate: LossGate, loss: float) -> str:
    gate.report(loss)
    return gate.problem


# One rank's losses.


@given(st.lists(losses, max_size=100), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_never_passes_and_leaves_no_trace(
    history: list[float], bad: float
) -> None:
    one, other = LossGate(20.0), LossGate(20.0)
    for loss in history:
        assert judged(one, loss) == judged(other, loss) == ""
        assert "the loss is" in judged(one, bad)


@given(st.lists(losses, min_size=LEAST_HISTORY, max_size=100))
def test_a_spike_is_refused_and_a_level_that_stays_is_not(history: list[float]) -> None:
    gate = LossGate(3.0)
    for loss in [0.5] * LEAST_HISTORY + [1.0] * 5:
        assert not judged(gate, loss)
    assert "above 3 times its median" in judged(gate, 3.5)
    refused = sum(bool(judged(gate, 5.0)) for _ in range(HISTORY))
    assert 0 < refused < HISTORY and not judged(gate, 5.0)


@given(st.lists(st.floats(), max_size=50))
def test_without_a_gate_everything_passes(history: list[float]) -> None:
    gate = LossGate(0.0)
    assert not any(judged(gate, loss) for loss in history)


@pytest.mark.parametrize("factor", [0.5, 1.0, -1.0])
def test_a_factor_that_refuses_ordinary_losses_is_no_setting(factor: float) -> None:
    with pytest.raises(ConfigError, match="loss_gate"):
        SnapshotConfig(loss_gate=factor)


# One rank's snapshots.


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_state_with_a_bad_loss_is_not_captured(smp: FakeSmp, loss: float) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.prepare(state)
    manager.report_loss(loss)
    snapshot = smp.grant(2)
    assert manager.save(2, state).skipped
    assert smp.abandoned_ids == {snapshot: f"the loss is {loss}"} and not smp.sealed_records
    assert manager.stats.gated == 1
    manager.close()


def test_the_last_good_snapshot_stays_and_the_next_good_one_replaces_it(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.report_loss(1.0)
    first = capture(smp, manager, state, 2).snapshot
    manager.report_loss(math.nan)
    refused = smp.grant(4, slot=1)
    assert manager.save(4, state).skipped
    manager.report_loss(1.0)
    second = capture(smp, manager, state, 6, slot=1).snapshot
    assert list(smp.sealed_records) == [first, second]
    assert list(smp.abandoned_ids) == [refused] and manager.stats.gated == 1
    manager.close()


def test_a_bad_loss_without_a_permit_gives_nothing_up(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.prepare(state)
    manager.report_loss(math.nan)
    smp.grant(3)
    assert manager.save(2, state).skipped
    assert not smp.abandoned_ids and manager.stats.gated == 0
    manager.close()


@pytest.mark.parametrize("settings", [{}, {"loss_gate": 5.0}])
def test_ranks_that_report_nothing_capture(smp: FakeSmp, settings: dict[str, float]) -> None:
    manager, state = make_manager(smp, settings=settings), make_training()
    if not settings:
        manager.report_loss(math.nan)
    snapshot = capture(smp, manager, state, 2).snapshot
    assert list(smp.sealed_records) == [snapshot] and manager.stats.gated == 0
    manager.close()
