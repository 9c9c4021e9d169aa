"""What a snapshot costs a node does not grow with the job; the model agrees with counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.scale.counted import Count, count_all
from benchmarks.scale.model import Shape, control_messages, encoder_bytes
from megatron_ft.coordinator.plan import Sizes, orders_by_node, stripe_orders
from megatron_ft.recovery.decide import StripeState

COUNTED = Path(__file__).parents[1] / "benchmarks" / "scale" / "counted.json"


def require_model_of(counted: Count) -> None:
    shape = Shape(counted.nodes, 1, "xor:2", counted.shard_bytes, counted.block_bytes)
    tally = control_messages(shape)
    assert {k: n for k, (n, _) in tally.kinds.items()} == {
        k: n for k, (n, _) in counted.kinds.items()
    }
    assert abs(tally.length - counted.length) < 0.1 * counted.length
    assert abs(encoder_bytes(shape) - counted.encoder_bytes) < 0.01 * counted.encoder_bytes


def test_the_model_agrees_with_what_was_counted() -> None:
    counts = msgspec.json.decode(COUNTED.read_bytes(), type=list[Count])
    assert [counted.nodes for counted in counts] == [2, 4, 8, 16]
    for counted in counts:
        require_model_of(counted)


@pytest.mark.all_layouts
def test_the_model_agrees_with_jobs_that_run_now() -> None:
    for counted in count_all((2, 4), "xor:2"):
        require_model_of(counted)


@pytest.mark.parametrize("protect", ["xor:4", "rs:6+2"])
def test_a_node_and_a_rank_cost_the_same_in_a_larger_job(protect: str) -> None:
    small, large = (Shape(nodes, 4, protect, 48 << 20) for nodes in (16, 128))
    one, other = control_messages(small), control_messages(large)
    assert one.messages * 8 == other.messages
    assert other.length < 1.05 * 8 * one.length
    assert encoder_bytes(small) == encoder_bytes(large)


def test_each_node_is_sent_its_own_stripes_in_one_sequence() -> None:
    places = {"a": "n0", "b": "n1", "c": "n2", "d": "n1", "e": "n2", "f": "n2"}
    stripes = [StripeState("xor", 1, 1, 128, pair) for pair in (("a", "b"), ("c", "d"), ("e", "f"))]
    orders = stripe_orders(stripes, places, ("n0", "n1", "n2", "n3"), Sizes(64, 2))
    parts = orders_by_node(orders, places)
    assert {node: [order.index for order in part] for node, part in parts.items()} == {
        "n0": [0],
        "n1": [0, 1],
        "n2": [1, 2],
    }
