"""Calls of a SnapshotManager that cannot be right: answered at once, and training stays whole."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.core.errors import UsageError
from megatron_ft.trainer import manager as module
from megatron_ft.trainer.usage import ManagersOfProcess, iteration_number
from tests.support.captures import WAIT, FakeSmp, capture, make_manager, saved
from tests.support.small_training import advance, make_training

NO_NUMBERS = [3.5, 3.0, None, True, np.bool_(True), "3", -1, 2**63, 2**70, np.uint64(2**63)]
NO_NUMBERS += [torch.tensor(3.0), torch.tensor(True), torch.tensor([3, 4]), [3], float("nan")]


@pytest.mark.parametrize("given", NO_NUMBERS, ids=repr)
def test_what_is_no_number_of_an_iteration_is_refused_before_training(
    smp: FakeSmp, given: Any
) -> None:
    manager = make_manager(smp)
    with pytest.raises(UsageError, match=r"save\(\) got .* whole number from 0 to 2\*\*63"):
        manager.save(given, make_training())
    assert smp.arena is None, "the job was asked for an arena"
    manager.close()


@pytest.mark.parametrize("given", [3.5, None, 2**70], ids=repr)
def test_later_it_costs_a_snapshot_and_no_step(
    smp: FakeSmp, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that does not fit into the page of heartbeats made every later step fail."""
    manager, state = make_manager(smp), make_training()
    manager.register_fence(state["optimizer"])
    advance(state, 1)
    capture(smp, manager, state)
    with caplog.at_level(logging.WARNING):
        assert manager.save(given, state).skipped
    assert "training continues" in caplog.text and "whole number" in caplog.text
    advance(state, 2)
    assert capture(smp, manager, state, 3).captured.result(WAIT)
    manager.close()


@pytest.mark.parametrize(
    "given", [7, np.int32(7), np.uint64(7), torch.tensor(7), torch.tensor([7]), np.array(7)]
)
def test_integers_of_libraries_are_numbers(given: Any) -> None:
    number = iteration_number(given)
    assert (number, type(number)) == (7, int)


def test_a_save_in_another_thread_than_the_steps_is_refused(
    smp: FakeSmp, caplog: pytest.LogCaptureFixture
) -> None:
    """It would copy what the optimizer is changing; the next call in the right thread captures."""
    manager, state = make_manager(smp), make_training()
    manager.register_fence(state["optimizer"])
    advance(state, 1)
    manager.prepare(state)
    assert not capture(smp, manager, state, 1).skipped
    smp.grant(2)
    tickets: list[Any] = []
    saver = threading.Thread(target=lambda: tickets.append(manager.save(2, state)), name="saver")
    with caplog.at_level(logging.WARNING):
        saver.start()
        saver.join(WAIT)
    assert tickets[0].skipped and "thread 'saver'" in caplog.text
    assert manager.save(2, state).captured.result(WAIT)
    smp.wait_ended()
    manager.close()


def test_a_loop_in_changing_threads_is_protected(smp: FakeSmp) -> None:
    """Each iteration in a thread of its own, as asyncio.to_thread gives it."""
    manager, state = make_manager(smp), make_training()
    manager.register_fence(state["optimizer"])
    advance(state, 0)
    manager.prepare(state)

    def iteration(number: int) -> None:
        advance(state, number)
        captured.append(not capture(smp, manager, state, number).skipped)

    captured: list[bool] = []
    for number in (1, 2, 3):
        thread = threading.Thread(target=iteration, args=(number,))
        thread.start()
        thread.join(WAIT)
    assert captured == [True] * 3
    manager.close()


def test_numbers_that_fall_are_named_and_training_stays_protected(
    smp: FakeSmp, caplog: pytest.LogCaptureFixture
) -> None:
    manager, state = make_manager(smp), make_training()
    capture(smp, manager, state, 9)
    with caplog.at_level(logging.WARNING):
        assert manager.save(5, state).skipped
    assert "save(5) follows save(9)" in caplog.text
    assert capture(smp, manager, state, 6).captured.result(WAIT)
    manager.close()


def test_a_second_manager_is_refused_at_once(smp: FakeSmp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_open", set())
    monkeypatch.setattr(module, "_managers", ManagersOfProcess())
    first = make_manager(smp)
    with pytest.raises(UsageError, match=f"a SnapshotManager already, of shard {first.shard_id}"):
        module.SnapshotManager()
    capture(smp, first, make_training())
    first.close()
    with pytest.raises(UsageError, match="has captured in this process and was closed"):
        module.SnapshotManager()
    # A restart in process trains from the beginning, with a manager of its own.
    module._close_all()
    with pytest.raises(Exception, match="megatron-ft run"):
        module.SnapshotManager()


def test_an_offer_that_nobody_answers_ends_the_first_save(smp: FakeSmp) -> None:
    state = make_training()
    saved(smp, state)
    manager = make_manager(smp)
    with pytest.raises(UsageError, match=r"snapshot of iteration 1, .*load\(into=state\)"):
        manager.save(1, make_training())
    assert [type(error) for error in smp.unfit_errors] == [UsageError]
    manager.close()


@pytest.mark.parametrize("declines", [False, True])
def test_an_offer_that_was_answered_does_not(smp: FakeSmp, declines: bool) -> None:
    saved(smp, make_training())
    manager, state = make_manager(smp), make_training()
    if declines:
        manager.decline()
    else:
        assert manager.load(into=state) == 1
    assert manager.save(2, state).skipped
    manager.close()
