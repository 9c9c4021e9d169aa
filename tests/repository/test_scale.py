"""What a snapshot costs a node does not grow with the job; the model agrees with counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.scale.__main__ import shape_of
from benchmarks.scale.counted import Count, count_all
from benchmarks.scale.model import Shape, control_messages, encoder_bytes
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.encode import encode
from megatron_ft.supervisor.orders import orders_by_node, stripe_orders
from tests.support.erasure_samples import ThreadTransport, ThreadWorld, make_code, make_member

COUNTED = Path(__file__).parents[2] / "benchmarks" / "scale" / "counted.json"


def require_model_of(counted: Count) -> None:
    shape = shape_of(counted, "xor:2")
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


@pytest.mark.parametrize("protect", ["xor:2", "rs:2+2", "rs:3+1", "replica:3"])
def test_the_model_knows_what_a_member_sends(protect: str) -> None:
    """Of a stripe with so small blocks that digests count, which those of the jobs do not."""
    scheme, size = Scheme.parse(protect), 300_000
    kind, k, m = scheme.kind, scheme.data_members, scheme.parity_members
    code = make_code(kind, k, m, [size] * (k + m), 512)
    members = [make_member(code, number, size) for number in range(k + m)]

    def sent(number: int, transport: ThreadTransport) -> int:
        encode(code, members[number], transport, range(k + m))
        return transport.bytes_sent

    shape = Shape(k + m, 1, protect, code.data_bytes, code.block_bytes)
    for found in ThreadWorld(k + m).run(sent):
        assert isinstance(found, int) and abs(found - encoder_bytes(shape)) < 0.01 * found


@pytest.mark.all_layouts
def test_the_model_agrees_with_larger_jobs_that_run_now() -> None:
    for counted in count_all((4, 6), "xor:2"):
        require_model_of(counted)


@pytest.mark.parametrize("protect", ["xor:4", "rs:6+2"])
def test_a_node_and_a_rank_cost_the_same_in_a_larger_job(protect: str) -> None:
    small, large = (Shape(nodes, 4, protect, 48 << 20) for nodes in (16, 128))
    one, other = control_messages(small), control_messages(large)
    assert one.messages * 8 == other.messages == 8 * 128
    assert other.length < 1.05 * 8 * one.length
    assert encoder_bytes(small) == encoder_bytes(large)


def test_the_coordinator_holds_2048_nodes() -> None:
    """A snapshot takes 0.35 s of its processor time on a machine of today; twice is measured."""
    shape = Shape(2048, 8, "rs:6+2", 6 << 30)
    assert min(control_messages(shape).seconds for _ in range(2)) < 1.0


def test_each_node_is_sent_its_own_stripes_in_one_sequence() -> None:
    places = {"a": "n0", "b": "n1", "c": "n2", "d": "n1", "e": "n2", "f": "n2"}
    pairs = (("a", "b"), ("c", "d"), ("e", "f"))
    stripes = [StripeState("xor", 1, 1, 128, pair, 64) for pair in pairs]
    orders = stripe_orders(stripes, places, ("n0", "n1", "n2", "n3"))
    parts = orders_by_node(orders, places)
    assert {node: [order.index for order in part] for node, part in parts.items()} == {
        "n0": [0],
        "n1": [0, 1],
        "n2": [1, 2],
    }
