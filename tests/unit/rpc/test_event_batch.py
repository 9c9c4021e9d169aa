"""A node reports once for all its ranks, in order, and nothing urgent waits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import MOST_WAITED, EventBatch
from tests.protocol.model.memory import record_of

SHARDS = ("dp0", "dp1", "dp2")
ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)


def sealed(shard: str, snapshot: SnapshotId = ONE) -> m.Sealed:
    return m.Sealed(record_of(snapshot, shard, 12))


def cost(shard: str, snapshot: SnapshotId = ONE) -> m.CaptureCost:
    return m.CaptureCost(shard, snapshot, 0.1, 0.1, 1)


def encoded(shard: str, snapshot: SnapshotId = ONE) -> m.Encoded:
    return m.Encoded(snapshot, "w1", shard, bytes(32), (), 0, 0.0)


def tell(reports: EventBatch, *bodies: Any) -> list[int]:
    """How many events left after each of these."""
    return [len(reports.add(body, SHARDS)) for body in bodies]


def test_all_ranks_of_a_node_are_one_message() -> None:
    reports = EventBatch()
    captured = [body for shard in SHARDS for body in (cost(shard), sealed(shard))]
    assert tell(reports, *captured) == [0, 0, 0, 0, 0, 6]
    assert tell(reports, *map(encoded, SHARDS), m.OrderDone(ONE, "w1")) == [0, 0, 0, 4]
    assert tell(reports, *(sealed(s, TWO) for s in SHARDS)) == [0, 0, 3]


@pytest.mark.parametrize(
    "body",
    [
        m.Missed("dp1", ONE),
        m.Abandoned("dp1", ONE, "slow"),
        m.WriterGone("trainer", "dp1", 7),
        m.OrderFailed(ONE, "w1", "mpi"),
        m.Hello(7, 0, 0, "dp0", (), 1),
    ],
    ids=lambda body: type(body).__name__,
)
def test_what_is_urgent_leaves_at_once_with_what_came_before(body: Any) -> None:
    reports = EventBatch()
    assert tell(reports, sealed("dp0"), body) == [0, 2]


def test_a_late_seal_does_not_hold_up_the_next_snapshot() -> None:
    reports = EventBatch()
    assert tell(reports, sealed("dp0", TWO), sealed("dp1", ONE)) == [0, 2]
    assert tell(reports, sealed("dp1", TWO), sealed("dp2", TWO)) == [0, 2]


def test_nothing_waits_for_ever() -> None:
    reports = EventBatch()
    assert tell(reports, sealed("dp0")) == [0]
    left = [len(reports.on_heartbeat()) for _ in range(2 * MOST_WAITED)]
    assert left == [0] * (MOST_WAITED - 1) + [1] + [0] * MOST_WAITED


kinds = st.sampled_from([sealed, cost, encoded, lambda shard, of: m.Missed(shard, of)])
words = st.tuples(kinds, st.sampled_from(SHARDS), st.sampled_from([ONE, TWO]), st.booleans())


@given(st.lists(words, max_size=30))
def test_everything_leaves_once_and_in_its_order(said: list[Any]) -> None:
    reports, left, told = EventBatch(), [], []
    for make, shard, snapshot, looks in said:
        told.append(make(shard, snapshot))
        left += reports.add(told[-1], SHARDS)
        left += reports.on_heartbeat() if looks else []
    assert [*left, *reports.flush()] == told
