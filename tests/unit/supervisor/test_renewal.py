"""The sizes of arenas that come in place of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.identity import Ancestor
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.orders import create_requests, file_bytes
from megatron_ft.supervisor.renewal import ArenaRenewal, enlarged

BLOCK = 4096
STRIPES = (
    StripeState("rs", 2, 1, 4 * BLOCK, ("a", "b", "c"), BLOCK),
    StripeState("none", 1, 0, 3 * BLOCK, ("d",), BLOCK),
)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100 * BLOCK)))
def test_every_shard_has_room_and_no_stripe_more_than_it_needs(wanted: dict[str, int]) -> None:
    for before, after in zip(STRIPES, enlarged(STRIPES, wanted), strict=True):
        unit = before.data_members * BLOCK
        needed = max(wanted.get(shard, 0) for shard in before.members)
        assert after.data_bytes >= max(needed, before.data_bytes)
        assert after.data_bytes == before.data_bytes or after.data_bytes < needed + unit
        assert after.data_bytes % unit == 0
        assert (after.members, after.codec, after.parity_members) == (
            before.members,
            before.codec,
            before.parity_members,
        )


def test_the_file_of_an_arena_has_parity_and_all_slots() -> None:
    requests = create_requests(STRIPES, 1, (Ancestor(1, None),), 2)
    assert file_bytes(requests["a"]) > 2 * (4 + 2) * BLOCK > file_bytes(requests["d"]) - 6 * 32768


def test_a_rank_that_cannot_use_its_arena_is_named_once_for_each_reason() -> None:
    said: list[JobEvent] = []
    observers = Observers()
    observers.subscribe(said.append)
    none: Any = None
    job = SimpleNamespace(fleet=SimpleNamespace(observers=observers))
    renewal = ArenaRenewal(cast(Any, job), none, none, none)
    for reason in ("no memory", "no memory", "no device"):
        body = m.Unattached("pp0-tp0-dp1-ep0", reason)
        renewal.on_event(m.NodeEvent("n0", 1, body))
    assert [event.kind for event in said] == ["not_attached", "not_attached"]
    assert "pp0-tp0-dp1-ep0 cannot use its larger arena (no memory)" in said[0].text
    assert "tried again every 5 s" in said[0].text and "no device" in said[1].text
