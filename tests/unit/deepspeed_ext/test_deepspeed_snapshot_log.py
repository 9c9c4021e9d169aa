"""Snapshots in DeepSpeed's monitors: what is new, on rank 0, and never at training's cost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.run import MonitorLog
from megatron_ft.trainer.stats import CaptureStats, LastCapture


class Monitor:
    def __init__(self, enabled: bool = True) -> None:
        self.enabled, self.events = enabled, []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events.append(events)


def engine_of(monitor: Monitor, rank: int = 0) -> Any:
    return SimpleNamespace(global_rank=rank, monitor=monitor, global_samples=64)


def test_only_what_has_changed_is_written_over_samples() -> None:
    monitor, stats = Monitor(), CaptureStats()
    shown = MonitorLog(engine_of(monitor), stats)
    shown.end_step()
    assert ("inmem-snapshot/taken", 0, 64) in monitor.events[0]
    shown.end_step()
    assert len(monitor.events) == 1
    stats.taken, stats.last = 1, LastCapture(4, 0.5, 0.001, 2 << 20)
    shown.end_step()
    names = {name.rpartition("/")[2]: value for name, value, _ in monitor.events[1]}
    assert names == {
        "taken": 1,
        "captured-iteration": 4,
        "capture-ms": 500,
        "stall-ms": 1,
        "mib": 2,
    }


@pytest.mark.parametrize(("enabled", "rank"), [(False, 0), (True, 1)])
def test_without_a_monitor_and_on_other_ranks_nothing_is(enabled: bool, rank: int) -> None:
    monitor = Monitor(enabled)
    MonitorLog(engine_of(monitor, rank), CaptureStats()).end_step()
    assert not monitor.events


def test_a_monitor_that_fails_ends_the_log_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor, stats = Monitor(), CaptureStats()
    shown = MonitorLog(engine_of(monitor), stats)
    monitor.write_events = lambda events: 1 / 0  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.WARNING):
        shown.end_step()
        stats.taken = 1
        shown.end_step()
    assert [r.getMessage() for r in caplog.records] == [
        "snapshots are no longer logged; training continues"
    ]
