"""What an exit with 0 means: a pure decision over what ranks have said."""

from __future__ import annotations

import pytest

from megatron_ft.supervisor.ends import End, judge


@pytest.mark.parametrize(
    ("said", "holds", "expected"),
    [
        ([True, True], True, End.FINISHED),
        ([True], True, End.FINISHED),
        ([True, False], True, End.EARLY),
        ([False], False, End.EARLY),
        ([], True, End.UNKNOWN),
        ([], False, End.FINISHED),
    ],
)
def test_one_rank_that_has_not_finished_makes_an_early_end(
    said: list[bool], holds: bool, expected: End
) -> None:
    assert judge(said, holds=holds, frees=False) is expected
    assert judge(said, holds=holds, frees=True) is End.FINISHED
