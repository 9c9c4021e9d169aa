"""Counting snapshots that were skipped for a reader."""

from __future__ import annotations

import pytest

from megatron_ft.supervisor.schedule import Skips


def test_one_period_is_told_once_and_counted_in_snapshots() -> None:
    skips = Skips()
    assert skips.begin(11, 10)
    assert not skips.begin(15, 10) and not skips.begin(19, 10)
    assert skips.end(21, interval=5) == 2
    assert skips.end(30, interval=5) is None
    assert skips.begin(30, 10) and skips.end(34, interval=5) == 0
    assert skips.total == 2


@pytest.mark.parametrize("later", [-1, 3])
def test_an_incarnation_that_starts_further_back_counts_nothing_below_zero(later: int) -> None:
    skips = Skips()
    skips.begin(50, 10)
    assert skips.end(later, interval=2) == 0
