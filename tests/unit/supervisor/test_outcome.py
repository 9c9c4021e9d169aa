"""What an exit with 0 means: a pure decision over what ranks have said."""

from __future__ import annotations

import pytest

from megatron_ft.supervisor.outcome import Outcome, judge


@pytest.mark.parametrize(
    ("said", "holds", "expected"),
    [
        ([True, True], True, Outcome.FINISHED),
        ([True], True, Outcome.FINISHED),
        ([True, False], True, Outcome.EARLY),
        ([False], False, Outcome.EARLY),
        ([], True, Outcome.UNKNOWN),
        ([], False, Outcome.FINISHED),
    ],
)
def test_one_rank_that_has_not_finished_makes_an_early_end(
    said: list[bool], holds: bool, expected: Outcome
) -> None:
    assert judge(said, holds=holds, frees=False) is expected
    assert judge(said, holds=holds, frees=True) is Outcome.FINISHED
