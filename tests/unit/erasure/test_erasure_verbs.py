"""Encode and rebuild in a world of threads: damage, refusals, traffic, memory."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.errors import CorruptBlockError, UnrecoverableError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure import member as member_module
from megatron_ft.erasure.encode import EncodeResult, encode
from megatron_ft.erasure.member import (
    CorruptMemberError,
    MemberView,
    StripeCode,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.rebuild import rebuild
from megatron_ft.erasure.rows import held_bytes
from megatron_ft.erasure.transport import EXCHANGES_IN_FLIGHT, TURNS_EARLY, TURNS_LATE, MessageKind
from tests.support.erasure_samples import (
    ThreadTransport,
    make_code,
    make_lost,
    make_member,
    protected,
    used_of,
    writable,
)
from tests.support.stripe_runs import own_errors, run, succeed

MOST_OFFERED = TURNS_EARLY + TURNS_LATE + 2 * EXCHANGES_IN_FLIGHT
"""Messages that a member has started to send; a bound that does not know the data's length."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces in a chunk of a few KiB, with a short one at the end."""
    monkeypatch.setattr(member_module, "PIECE_BYTES", 2048)


def encoded(code: StripeCode, lengths: list[int]) -> list[MemberView]:
    return together(code, [make_member(code, n, length) for n, length in enumerate(lengths)])


def together(code: StripeCode, members: Sequence[MemberView]) -> list[MemberView]:
    """Encode; the members as they are protected, each in memory of its own.

    Their padding changes behind it.
    """
    members, peers = [writable(member) for member in members], range(len(members))
    results = succeed(len(members), lambda n, t: encode(code, members[n], t, peers))
    fill(members, [17 + number for number in peers])
    return [protected(m, r) for m, r in zip(members, results, strict=True)]


def blame(results: list[Any]) -> set[str]:
    """Whom they name as corrupt; any other error is raised."""
    errors = own_errors(results)
    for error in errors:
        if not isinstance(error, CorruptMemberError):
            raise error
    return {e.shard_id for e in errors if isinstance(e, CorruptMemberError)}


def require_all(results: list[Any], kind: type[BaseException], text: str) -> None:
    """Nobody succeeded, and everyone who failed by himself failed like this."""
    assert all(isinstance(r, BaseException) for r in results)
    errors = own_errors(results)
    assert errors and all(type(e) is kind and text in str(e) for e in errors), errors


codes = st.sampled_from(
    [
        *(("rs", 3, 1), ("rs", 2, 2), ("rs", 1, 3), ("rs", 2, 3), ("xor", 2, 1)),
        *(("xor", 1, 1), ("replica", 1, 1), ("replica", 1, 2)),
    ]
)


@given(codes, st.data())
@settings(max_examples=20, deadline=None)
def test_any_lengths_and_losses(shape: tuple[str, int, int], data: st.DataObject) -> None:
    kind, k, m = shape
    lengths = data.draw(st.lists(st.integers(0, 9000), min_size=k + m, max_size=k + m))
    code = make_code(kind, k, m, lengths, 512)
    members = encoded(code, lengths)
    numbers = st.integers(0, k + m - 1)
    lost = data.draw(st.sets(numbers, min_size=1, max_size=m))
    views = [make_lost(code) if n in lost else v for n, v in enumerate(members)]
    peers = range(k + m)
    results = succeed(k + m, lambda n, t: rebuild(code, views[n], t, peers, lost))
    for view, member, result in zip(views, members, results, strict=True):
        assert np.array_equal(used_of(view, member), used_of(member, member))
        assert np.array_equal(view.parity, member.parity)
        assert np.array_equal(view.parity_digests, member.parity_digests)
        assert (result.record, result.parity_root) == (member.record, member.parity_root)
        assert result.stripe_table == member.stripe_table


@given(codes, st.data())
@settings(max_examples=40, deadline=None)
def test_parity_digests_are_of_the_parity_in_memory(
    shape: tuple[str, int, int], data: st.DataObject
) -> None:
    """Of whole blocks, wherever tensors, digest table and the zeros behind it end."""
    kind, k, m = shape
    lengths = data.draw(st.lists(st.integers(0, 9000), min_size=k + m, max_size=k + m))
    code = make_code(kind, k, m, lengths, 512)
    for view in encoded(code, lengths):
        assert np.array_equal(view.parity_digests, parity_digests_of(code, view.parity))
        assert view.parity_root == parity_root(view.parity_digests)


@given(codes, st.data())
@settings(max_examples=20, deadline=None)
def test_padding_counts_as_zeros_whatever_it_is(
    shape: tuple[str, int, int], data: st.DataObject
) -> None:
    """Of any member, before an encode and between it and a rebuild."""
    kind, k, m = shape
    lengths = data.draw(st.lists(st.integers(0, 9000), min_size=k + m, max_size=k + m))
    code = make_code(kind, k, m, lengths, 512)
    members = [writable(make_member(code, n, length)) for n, length in enumerate(lengths)]
    fill(members, [0] * len(members))
    zeros = together(code, members)
    fills = st.lists(st.integers(0, 255), min_size=k + m, max_size=k + m)
    fill(members, data.draw(fills))
    others = together(code, members)
    for one, other in zip(zeros, others, strict=True):
        assert np.array_equal(one.parity, other.parity)
        assert one.parity_root == other.parity_root
    fill(others, data.draw(fills))
    views = [make_lost(code), *others[1:]]
    succeed(k + m, lambda n, t: rebuild(code, views[n], t, range(k + m), {0}))
    assert np.array_equal(used_of(views[0], members[0]), used_of(members[0], members[0]))
    assert np.array_equal(views[0].parity, zeros[0].parity)


def fill(members: Sequence[MemberView], fills: Sequence[int]) -> None:
    """Have each member's padding hold this byte."""
    for member, byte in zip(members, fills, strict=True):
        assert member.record is not None
        member.data[member.record.used_bytes :] = byte


@given(codes, st.data())
@settings(max_examples=40, deadline=None)
def test_a_damaged_source_is_never_coded(shape: tuple[str, int, int], data: st.DataObject) -> None:
    """Whatever byte of whatever member changes after sealing, encode names its shard."""
    kind, k, m = shape
    lengths = data.draw(st.lists(st.integers(0, 6000), min_size=k + m, max_size=k + m))
    code = make_code(kind, k, m, lengths, 512)
    members = [writable(make_member(code, n, length)) for n, length in enumerate(lengths)]
    victim = data.draw(st.integers(0, k + m - 1))
    at = data.draw(st.integers(0, used_of(members[victim], members[victim]).size - 1))
    members[victim].data[at] ^= 1 << data.draw(st.integers(0, 7))
    results = run(k + m, lambda n, t: encode(code, members[n], t, range(k + m)))
    assert blame(results) == {f"s{victim}"}
    assert not any(isinstance(r, EncodeResult) for r in results)


@given(st.sampled_from([("rs", 3, 1), ("xor", 3, 1), ("rs", 2, 2), ("replica", 1, 2)]), st.data())
@settings(max_examples=80, deadline=None)
def test_a_damaged_survivor_is_never_used(shape: tuple[str, int, int], data: st.DataObject) -> None:
    """Rebuild either names the damaged survivor, or never looked at that byte."""
    kind, k, m = shape
    lengths = data.draw(st.lists(st.integers(0, 6000), min_size=k + m, max_size=k + m))
    code = make_code(kind, k, m, lengths, 512)
    members = encoded(code, lengths)
    numbers = list(range(k + m))
    lost = data.draw(st.sets(st.sampled_from(numbers), min_size=1, max_size=m))
    victim = data.draw(st.sampled_from([n for n in numbers if n not in lost]))
    views = [make_lost(code) if n in lost else writable(v) for n, v in enumerate(members)]
    region = data.draw(st.sampled_from(["data", "parity", "parity_digests"]))
    damaged = getattr(views[victim], region).view(np.uint8)
    damaged[data.draw(st.integers(0, damaged.size - 1))] ^= 0x10
    results = run(k + m, lambda n, t: rebuild(code, views[n], t, range(k + m), lost))
    if blame(results):
        assert blame(results) == {f"s{victim}"}
    else:
        assert not any(isinstance(r, BaseException) for r in results)
        wanted = [(views[n], members[n]) for n in lost]
        assert all(np.array_equal(used_of(v, m), used_of(m, m)) for v, m in wanted)


def test_every_block_of_every_survivor_counts_when_all_are_needed() -> None:
    """With m lost, all of each survivor is a source: any damaged block must be found."""
    code = make_code("rs", 2, 1, [5000] * 3, 512)
    members = encoded(code, [5000] * 3)
    for region in ("data", "parity"):
        region_of = {"data": used_of(members[1], members[1]), "parity": members[1].parity}
        for block in range(-(-region_of[region].size // 512)):
            views = [make_lost(code), writable(members[1]), members[2]]
            getattr(views[1], region)[block * 512 + 7] ^= 1
            results = run(3, lambda n, t, v=views: rebuild(code, v[n], t, range(3), {0}))
            assert blame(results) == {"s1"}, (region, block)


def test_the_error_names_shard_and_block() -> None:
    code = make_code("rs", 2, 1, [5000] * 3, 512)
    members = [writable(make_member(code, n, 5000)) for n in range(3)]
    members[2].data[3 * 512] ^= 1
    results = run(3, lambda n, t: encode(code, members[n], t, range(3)))
    found = [r for r in results if isinstance(r, CorruptMemberError)]
    assert [(e.shard_id, e.block) for e in found] == [("s2", 3)]
    assert "s2, block 3" in str(found[0])


def test_a_damaged_survivor_can_be_rebuilt_itself() -> None:
    code = make_code("rs", 2, 2, [9000] * 4)
    members = encoded(code, [9000] * 4)
    views = [make_lost(code), writable(members[1]), members[2], members[3]]
    views[1].data[5] ^= 1
    results = run(4, lambda n, t: rebuild(code, views[n], t, range(4), {0}))
    assert blame(results) == {"s1"}
    succeed(4, lambda n, t: rebuild(code, views[n], t, range(4), {0, 1}))
    both = zip(views, members, strict=True)
    assert all(np.array_equal(used_of(v, m), used_of(m, m)) for v, m in both)


def test_one_loss_too_many_is_refused_at_once() -> None:
    code = make_code("rs", 2, 2, [100] * 4)
    lost = make_lost(code)
    results = run(4, lambda n, t: rebuild(code, lost, t, range(4), {0, 1, 3}))
    require_all(results, UnrecoverableError, "3 of 4 members")
    assert (lost.data == lost.data[0]).all()


@pytest.mark.parametrize("other", [{"snapshot": SnapshotId(3, 99)}, {"iteration": 16}])
def test_members_of_different_snapshots_are_refused(other: dict[str, Any]) -> None:
    code = make_code("xor", 2, 1, [100] * 3)
    members = [make_member(code, n, 100) for n in range(2)]
    members.append(make_member(code, 2, 100, **other))
    results = run(3, lambda n, t: encode(code, members[n], t, range(3)))
    require_all(results, ValueError, "different snapshots")


@pytest.mark.parametrize("other", [{"block_bytes": 512}])
def test_members_that_digest_otherwise_never_protect_each_other(other: dict[str, int]) -> None:
    code = make_code("rs", 2, 1, [5000] * 3, 1024)
    codes = [code, code, dataclasses.replace(code, **other)]
    members = [make_member(codes[n], n, 5000) for n in range(3)]
    results = run(3, lambda n, t: encode(codes[n], members[n], t, range(3)))
    assert all(isinstance(result, BaseException) for result in results)
    assert blame(results)


def test_a_table_without_all_members_is_refused() -> None:
    code = make_code("rs", 2, 1, [100] * 3)
    members = encoded(code, [100] * 3)
    short = members[0].stripe_table[:2]
    members = [dataclasses.replace(member, stripe_table=short) for member in members]
    members[2] = make_lost(code)
    results = run(3, lambda n, t: rebuild(code, members[n], t, range(3), {2}))
    require_all(results, CorruptBlockError, "2 of 3 members")


def test_survivors_with_different_tables_are_refused() -> None:
    code = make_code("rs", 2, 1, [100] * 3)
    members = encoded(code, [100] * 3)
    table = members[1].stripe_table
    members[1] = dataclasses.replace(members[1], stripe_table=(table[1], table[0], table[2]))
    members[0] = make_lost(code)
    results = run(3, lambda n, t: rebuild(code, members[n], t, range(3), {0}))
    require_all(results, CorruptBlockError, "different tables")


def test_a_replaced_survivor_is_named() -> None:
    """Its bytes are sound, but they are not those that were protected."""
    code = make_code("rs", 2, 1, [100] * 3)
    members = encoded(code, [100] * 3)
    other = make_member(code, 1, 77)
    members[1] = dataclasses.replace(members[1], data=other.data, record=other.record)
    members[0] = make_lost(code)
    results = run(3, lambda n, t: rebuild(code, members[n], t, range(3), {0}))
    assert blame(results) == {"s1"}


def test_parity_of_other_bytes_is_never_a_source() -> None:
    """It matches its digests, but not the root that was stored when it was protected."""
    code = make_code("rs", 2, 1, [5000] * 3, 512)
    members, others = encoded(code, [5000] * 3), encoded(code, [4000] * 3)
    views = [make_lost(code), *members[1:]]
    views[1] = dataclasses.replace(
        views[1], parity=others[1].parity, parity_digests=others[1].parity_digests
    )
    assert blame(run(3, lambda n, t: rebuild(code, views[n], t, range(3), {0}))) == {"s1"}


def test_a_rebuild_ends_for_nobody_before_all_that_was_lost_is_proved() -> None:
    """Survivors and a whole member have nothing more to do when another one's bytes are wrong."""
    code = make_code("rs", 2, 2, [5000] * 4, 512)
    views = encoded(code, [5000] * 4)
    views[0], views[1] = make_lost(code), make_lost(code)

    def flip(kind: MessageKind, buffer: Bytes) -> None:
        if kind is MessageKind.RESULT and np.shares_memory(buffer, views[1].data):
            buffer[0] ^= 1

    def work(number: int, transport: ThreadTransport) -> object:
        if number == 1:
            transport.on_received = flip
        return rebuild(code, views[number], transport, range(4), {0, 1})

    require_all(run(4, work), CorruptMemberError, "shard s1")


@pytest.mark.parametrize("verb", ["encode", "rebuild"])
@pytest.mark.parametrize("region", ["data", "parity"])
def test_what_is_damaged_as_it_arrives_is_found(verb: str, region: str) -> None:
    """A bit of member 1 flips whenever a result has arrived there; digests arrive unharmed."""
    code = make_code("rs", 2, 2, [5000] * 4, 512)
    views = encoded(code, [5000] * 4)
    views[1] = make_member(code, 1, 5000) if verb == "encode" else make_lost(code)
    home = getattr(views[1], region)

    def flip(kind: MessageKind, buffer: Bytes) -> None:
        if kind is MessageKind.RESULT and np.shares_memory(buffer, home):
            buffer[0] ^= 1

    def work(number: int, transport: ThreadTransport) -> object:
        if number == 1:
            transport.on_received = flip
        if verb == "encode":
            return encode(code, views[number], transport, range(4))
        return rebuild(code, views[number], transport, range(4), {1})

    untouched = verb == "encode" and region == "data"  # encoding receives no data
    assert blame(run(4, work)) == (set() if untouched else {"s1"})


def test_a_member_whose_table_is_damaged_is_named_by_all() -> None:
    code = make_code("rs", 2, 1, [5000] * 3, 512)
    members = [writable(v) for v in encoded(code, [5000] * 3)]
    record = members[0].record
    assert record is not None
    members[0].data[record.digest_offset] ^= 1
    results = run(3, lambda n, t: encode(code, members[n], t, range(3)))
    require_all(results, CorruptMemberError, "shard s0")


@pytest.mark.parametrize("shape", [("rs", 3, 1), ("rs", 2, 2), ("rs", 3, 3), ("replica", 1, 3)])
def test_traffic_is_the_least_possible(shape: tuple[str, int, int]) -> None:
    kind, k, m = shape
    members = k + m
    code = make_code(kind, k, m, [40000] * members)
    views = [make_member(code, n, 40000) for n in range(members)]
    transports: dict[int, ThreadTransport] = {}

    def work(number: int, transport: ThreadTransport) -> EncodeResult:
        transports[number] = transport
        return encode(code, views[number], transport, range(members))

    results = succeed(members, work)
    length = code.data_bytes
    for transport in transports.values():
        sent = transport.sent[MessageKind.SOURCE] + transport.sent[MessageKind.RESULT]
        assert sent == length * (members - 1) // (members - m)
        assert transport.bytes_sent >= sent
        assert 2 <= transport.most_taken <= EXCHANGES_IN_FLIGHT
        assert transport.most_offered <= MOST_OFFERED
    views = [protected(v, r) for v, r in zip(views, results, strict=True)]
    views[0] = make_lost(code)
    succeed(
        members,
        lambda n, t: (transports.update({n: t}), rebuild(code, views[n], t, range(members), {0})),
    )
    shares = [
        transports[n].sent[MessageKind.SOURCE] + transports[n].sent[MessageKind.RESULT]
        for n in range(1, members)
    ]
    # Each of N rows moves k-1 chunks to its solver and one to the lost member.
    assert sum(shares) == members * code.chunk_bytes * k
    unit = code.piece_bytes * k
    assert max(shares) - min(shares) <= unit, "the survivors' shares are uneven"
    # A piece of parity comes with its digests.
    assert all(2 <= t.most_taken <= 2 * EXCHANGES_IN_FLIGHT for t in transports.values())
    assert all(t.most_offered <= MOST_OFFERED for t in transports.values())
    assert transports[0].sent[MessageKind.SOURCE] + transports[0].sent[MessageKind.RESULT] == 0


def test_memory_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PIECE_BYTES", 16384)

    def peak(length: int) -> int:
        code = make_code("rs", 2, 2, [length] * 4, 16384)
        members = encoded(code, [length] * 4)
        views = [make_lost(code), *members[1:]]
        tracemalloc.start()
        succeed(4, lambda n, t: encode(code, members[n], t, range(4)))
        succeed(4, lambda n, t: rebuild(code, views[n], t, range(4), {0}))
        used = tracemalloc.get_traced_memory()[1] + held_bytes()
        tracemalloc.stop()
        return used

    peak(200_000)  # first use of everything
    buffers = held_bytes()
    # What grows are digest tables: 8 bytes for each 16384, held by everyone of everyone.
    assert peak(1_600_000) - peak(200_000) < 0.1 * 1_400_000
    assert held_bytes() == buffers


def test_two_members_in_one_process_are_refused_unless_told_apart() -> None:
    code = make_code("xor", 1, 1, [10] * 2)
    view = make_member(code, 0, 10)
    results = run(1, lambda n, t: encode(code, view, t, [0, 0]))
    assert "stands for two members" in str(results[0])


def test_wrong_lengths_are_refused() -> None:
    code = make_code("xor", 1, 1, [10] * 2)
    view = dataclasses.replace(make_member(code, 0, 10), parity=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="parity bytes"):
        view.require_fit(code)
    with pytest.raises(ValueError, match="whole blocks"):
        StripeCode("rs", 3, 1, 4096, 1024)
