"""When a snapshot is drained."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.launch.drains import is_due


@given(
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(1, 7), st.booleans()), max_size=40),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_drains_are_an_interval_apart_and_none_is_forgotten(
    interval: int, commits: list[tuple[int, bool]]
) -> None:
    """Commits arrive while the disk is busy or not; whenever it is not, nothing due waits."""
    committed = last = 0
    for step, busy in commits:
        committed += step
        if not busy and is_due(last, committed, interval):
            assert committed - last >= interval > 0
            last = committed
        assert busy or not interval or committed - last < interval
    assert interval or last == 0
