"""Which shards of a snapshot are captured and judged, in whatever order their reports come."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.supervisor.cycle import CaptureRound

SHARDS = ("dp0", "dp1", "dp2")
WORDS: dict[str, Callable[[CaptureRound, str], None]] = {
    "sealed": lambda r, shard: r.sealed(shard, judged_later=False),
    "sealed, to be judged": lambda r, shard: r.sealed(shard, judged_later=True),
    "passed": lambda r, shard: r.passed(shard),
    "stopped": lambda r, shard: r.stopped(shard),
}
STORIES = st.lists(st.tuples(st.sampled_from(sorted(WORDS)), st.sampled_from(SHARDS)), max_size=15)


@given(STORIES)
@settings(max_examples=500, derandomize=True, deadline=None)
def test_it_is_complete_when_each_is_sealed_and_none_awaits_a_verdict(
    story: list[tuple[str, str]],
) -> None:
    captured = CaptureRound(SHARDS)
    for word, shard in story:
        WORDS[word](captured, shard)
    said = {shard: {word for word, of in story if of == shard} for shard in SHARDS}
    sealed = {s for s, words in said.items() if words & {"sealed", "sealed, to be judged"}}
    awaits = {s for s, words in said.items() if "sealed, to be judged" in words}
    passed = {s for s, words in said.items() if "passed" in words}
    assert captured.unsealed == set(SHARDS) - sealed
    assert captured.all_sealed() == (sealed == set(SHARDS))
    assert captured.complete == (sealed == set(SHARDS) and awaits <= passed)


@given(STORIES)
@settings(max_examples=500, derandomize=True, deadline=None)
def test_a_trainer_writes_until_it_says_that_it_has_stopped(story: list[tuple[str, str]]) -> None:
    """Neither what others say of its snapshot nor a verdict ends that."""
    captured = CaptureRound(SHARDS)
    for word, shard in story:
        WORDS[word](captured, shard)
    assert captured.writing == set(SHARDS) - {shard for word, shard in story if word == "stopped"}


def test_nothing_is_owed_where_no_snapshot_was_permitted() -> None:
    captured = CaptureRound(())
    assert captured.complete and not captured.writing
