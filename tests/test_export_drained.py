"""Which exports of drained snapshots stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.export.drained import superfluous


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text(), unique=True), st.integers(1, 5))
def test_the_newest_stay(names: list[str], keep: int) -> None:
    removed = superfluous(names, keep)
    assert removed + names[-keep:] == names and len(names) - len(removed) <= keep
