"""Which shards of a snapshot are captured, in whatever order their reports come."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.supervisor.cycle import CaptureRound

SHARDS = ("dp0", "dp1", "dp2")
WORDS: dict[str, Callable[[CaptureRound, str], None]] = {
    "sealed": lambda r, shard: r.sealed(shard),
    "stopped": lambda r, shard: r.stopped(shard),
}
STORIES = st.lists(st.tuples(st.sampled_from(sorted(WORDS)), st.sampled_from(SHARDS)), max_size=15)


@given(STORIES)
@settings(max_examples=500, derandomize=True, deadline=None)
def test_it_is_complete_when_each_is_sealed(story: list[tuple[str, str]]) -> None:
    captured = CaptureRound(SHARDS)
    for word, shard in story:
        WORDS[word](captured, shard)
    sealed = {shard for word, shard in story if word == "sealed"}
    assert captured.unsealed == set(SHARDS) - sealed
    assert captured.all_sealed() == (sealed == set(SHARDS))


@given(STORIES)
@settings(max_examples=500, derandomize=True, deadline=None)
def test_a_trainer_writes_until_it_says_that_it_has_stopped(story: list[tuple[str, str]]) -> None:
    """What others say of its snapshot does not end that."""
    captured = CaptureRound(SHARDS)
    for word, shard in story:
        WORDS[word](captured, shard)
    assert captured.writing == set(SHARDS) - {shard for word, shard in story if word == "stopped"}


def test_nothing_is_owed_where_no_snapshot_was_permitted() -> None:
    captured = CaptureRound(())
    assert captured.all_sealed() and not captured.writing
