"""Losses of an engine's iterations, as they are told to the gate."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from deepspeed_ext.run import LossReport


class Reported:
    """The one method of a manager that is called."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def report_loss(self, loss: float) -> None:
        self.losses.append(loss)


def backward(loss: Any, scale: float) -> str:
    if isinstance(loss, torch.Tensor):
        loss.mul_(scale)  # as some releases do
    return "what it returns"


def test_the_mean_over_the_micro_batches_is_reported_unscaled() -> None:
    report, manager = LossReport(True), Reported()
    for losses in ([1.0, 3.0], [5.0]):
        for loss in losses:
            kept = report.around_backward(backward, torch.tensor(loss), scale=0.5)
            assert kept == "what it returns"
        report.end_step(manager, None)  # type: ignore[arg-type]
    assert manager.losses == [2.0, 5.0]


def test_what_a_whole_step_returns_is_its_loss_where_no_backward_was_seen() -> None:
    report, manager = LossReport(True), Reported()
    report.end_step(manager, torch.tensor(7.0))  # type: ignore[arg-type]
    assert manager.losses == [7.0]


def test_without_the_gate_nothing_is_reported() -> None:
    report, manager = LossReport(False), Reported()
    report.end_step(manager, torch.tensor(7.0))  # type: ignore[arg-type]
    assert manager.losses == []


@pytest.mark.parametrize("loss", ["a word", None, torch.zeros(2)])
def test_a_loss_that_is_no_number_ends_the_reports_and_not_training(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report, manager = LossReport(True), Reported()
    with caplog.at_level(logging.WARNING):
        for each in (loss, torch.tensor(1.0)):
            report.around_backward(backward, each, scale=1.0)
            report.end_step(manager, None)  # type: ignore[arg-type]
    assert manager.losses == [] and not report.on
    assert [r.message.partition(":")[0] for r in caplog.records] == ["losses are no longer judged"]
