"""Meetings of ranks over a key-value store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.errors import ControlPlaneError

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.2)


def ranks(store: Any, count: int, timeout: timedelta = LONG) -> list[Any]:
    from deepspeed_ext.checkpoint_engine import Agreement  # it imports DeepSpeed

    return [Agreement(store, rank, count, timeout) for rank in range(count)]


def meet(agreements: list[Any], failures: dict[int, str]) -> list[Any]:
    """What each rank hears, or the error that it gets."""

    def one(rank: int) -> Any:
        try:
            return agreements[rank].meet("the work is done", failures.get(rank, ""))
        except ControlPlaneError as error:
            return str(error)

    with ThreadPoolExecutor(len(agreements)) as pool:
        return list(pool.map(one, range(len(agreements))))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.dictionaries(st.integers(0, 4), st.text(min_size=1, max_size=5)), max_size=4),
)
def test_every_rank_hears_the_same(count: int, meetings: list[dict[int, str]]) -> None:
    store = torch.distributed.HashStore()
    agreements = ranks(store, count)
    for failures in meetings:
        expected = {rank: text for rank, text in failures.items() if rank < count}
        assert meet(agreements, expected) == [expected] * count
    assert store.num_keys() <= 2, "old meetings are forgotten"


@pytest.mark.parametrize("missing", [[1], [1, 2]])
def test_ranks_that_do_not_come_are_named(missing: list[int]) -> None:
    agreements = ranks(torch.distributed.HashStore(), 4, SHORT)
    here = [a for rank, a in enumerate(agreements) if rank not in missing]
    for heard in meet(here, {}):
        assert f"ranks {missing} did not report" in heard and "that the work is done" in heard


def test_a_rank_that_comes_too_late_hears_that_it_was_missed() -> None:
    agreements = ranks(torch.distributed.HashStore(), 2, SHORT)
    meet(agreements[:1], {})
    (heard,) = meet(agreements[1:], {})
    assert "ranks [1]" in heard


def test_rank_0_is_named_if_it_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ext.checkpoint_engine._GRACE_SECONDS", 0.0)
    agreements = ranks(torch.distributed.HashStore(), 2, SHORT)
    assert "ranks [0]" in meet(agreements[1:], {})[0]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_says_why_and_waits_for_nobody(leaver: int) -> None:
    agreements = ranks(torch.distributed.HashStore(), 3)
    agreements[leaver].leave("KeyError: reserved")
    rest = [a for rank, a in enumerate(agreements) if rank != leaver]
    assert meet(rest, {}) == [{leaver: "KeyError: reserved"}] * 2
    assert meet(agreements, {}) == [{}] * 3, "the next meeting is as any"
