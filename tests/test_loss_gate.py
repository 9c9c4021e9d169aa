"""The loss gate: what passes, what waits for the next loss, what the coordinator makes of it."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_model.memory import record_of
from test_capture_manager import capture, make_training
from test_capture_support import FakeSmp, make_manager
from test_cycle import PLACES, Driver, to_all

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import CyclePhase, SnapshotEnded
from megatron_ft.trainer.loss_gate import HISTORY, LEAST_HISTORY, LossGate

losses = st.floats(0.1, 1.0)


# One rank's losses.


@given(st.lists(losses, max_size=100), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_never_passes_and_leaves_no_trace(
    history: list[float], bad: float
) -> None:
    one, other = LossGate(20.0), LossGate(20.0)
    for loss in history:
        assert one.judge(loss) == other.judge(loss) == ""
        assert "the loss is" in one.judge(bad)


@given(st.lists(losses, min_size=LEAST_HISTORY, max_size=100))
def test_a_spike_is_refused_and_a_level_that_stays_is_not(history: list[float]) -> None:
    gate = LossGate(3.0)
    for loss in [0.5] * LEAST_HISTORY + [1.0] * 5:
        assert not gate.judge(loss)
    assert "above 3 times its median" in gate.judge(3.5)
    refused = sum(bool(gate.judge(5.0)) for _ in range(HISTORY))
    assert 0 < refused < HISTORY and not gate.judge(5.0)


@given(st.lists(st.floats(), max_size=50))
def test_without_a_gate_everything_passes(history: list[float]) -> None:
    gate = LossGate(0.0)
    assert not any(gate.judge(loss) for loss in history)


@pytest.mark.parametrize("factor", [0.5, 1.0, -1.0])
def test_a_factor_that_refuses_ordinary_losses_is_no_setting(factor: float) -> None:
    with pytest.raises(ConfigError, match="loss_gate"):
        SnapshotConfig(loss_gate=factor)


# One rank's snapshots.


def test_a_snapshot_waits_for_the_next_loss(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    for iteration, loss, verdict in ((2, 1.0, ""), (4, math.nan, "the loss is nan")):
        manager.report_loss(1.0)
        snapshot = capture(smp, manager, state, iteration, slot=iteration // 2 - 1).snapshot
        assert smp.judged_later[snapshot] and snapshot not in dict(smp.verdicts)
        manager.report_loss(loss)
        assert dict(smp.verdicts)[snapshot] == verdict
    assert manager.stats.gated == 1
    manager.close()


def test_a_state_with_a_bad_loss_is_not_captured(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.prepare(state)
    manager.report_loss(math.inf)
    snapshot = smp.grant(2)
    assert manager.save(2, state).skipped
    assert smp.verdicts == [(snapshot, "the loss is inf")]
    assert list(smp.abandoned_ids) == [snapshot] and not smp.sealed_records
    assert manager.stats.gated == 1
    manager.close()


def test_ranks_that_report_nothing_hold_nothing_up(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    snapshot = capture(smp, manager, state, 2).snapshot
    assert smp.judged_later == {snapshot: False} and not smp.verdicts
    manager.close()


def test_a_rank_that_stops_reporting_holds_one_iteration_up(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.report_loss(1.0)
    snapshot = capture(smp, manager, state, 2).snapshot
    manager.save(3, state)
    assert smp.verdicts == [(snapshot, "")]
    manager.close()


def test_the_last_snapshot_of_training_waits_for_nobody(smp: FakeSmp) -> None:
    manager, state = make_manager(smp, settings={"loss_gate": 5.0}), make_training()
    manager.report_loss(1.0)
    snapshot = capture(smp, manager, state, 2).snapshot
    manager.close()
    assert smp.verdicts == [(snapshot, "")]


def test_without_the_setting_nothing_is_judged(smp: FakeSmp) -> None:
    manager, state = make_manager(smp), make_training()
    manager.report_loss(math.nan)
    snapshot = capture(smp, manager, state, 2).snapshot
    manager.report_loss(math.nan)
    assert smp.judged_later == {snapshot: False} and not smp.verdicts
    manager.close()


# The job.


def bodies(d: Driver, problem: str = "") -> list[m.Sealed | m.Judged]:
    """Three seals, two of which wait for a loss, and the two verdicts."""
    snapshot = d.cycle.snapshot
    sealed = [m.Sealed(record_of(snapshot, s, 12), s != "dp2") for s in PLACES]
    return [*sealed, m.Judged("dp0", snapshot, problem), m.Judged("dp1", snapshot)]


def test_nothing_is_encoded_before_the_last_seal_and_verdict_in_any_order() -> None:
    for order in permutations(range(5)):
        d = Driver()
        d.propose()
        words = bodies(d)
        for number in order[:-1]:
            assert d.cycle.handle("n0", words[number]) == []
        assert to_all(d.cycle.handle("n0", words[order[-1]]), m.Encode)


def test_a_bad_loss_aborts_the_snapshot_and_is_told_apart() -> None:
    for order in permutations(range(5)):
        d = Driver()
        d.propose()
        words = bodies(d, "the loss is nan")
        aborts = []
        for number in order:
            aborts += d.cycle.handle("n0", words[number])
        assert to_all(aborts, m.Abort) and d.cycle.phase == CyclePhase.ABORTING
        (ended,) = d.confirm(aborts)
        assert isinstance(ended, SnapshotEnded) and ended.gated and ended.level == "aborted"
        assert "dp0: the loss is nan" in ended.reason
        d.propose(progress=20)
        d.seal()
        assert d.cycle.phase == CyclePhase.ENCODING, "the next one is judged by itself"


def test_a_verdict_that_comes_late_changes_nothing() -> None:
    d = Driver().encoding()
    late = m.Judged("dp0", d.cycle.snapshot, "the loss is nan")
    assert d.cycle.handle("n0", late) == [] and d.cycle.phase == CyclePhase.ENCODING
