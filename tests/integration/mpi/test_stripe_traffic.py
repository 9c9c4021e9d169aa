"""How many bytes go over which link; counted, so it does not depend on the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.stripe.counting import PAYLOAD, CountingTransport
from benchmarks.stripe.messages import EncodeMessages
from benchmarks.stripe.other_ways import WAYS
from benchmarks.stripe.rank import Plan
from benchmarks.stripe.world import measure
from megatron_ft.erasure import member as member_module
from megatron_ft.erasure.encode import encode
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.rebuild import rebuild
from megatron_ft.erasure.rows import SparePieces
from megatron_ft.erasure.transport import Link, MessageKind, Transport
from megatron_ft.erasure.world import MPI, TCP
from tests.support.erasure_samples import (
    ThreadWorld,
    coded_of,
    make_code,
    make_lost,
    make_member,
    protected,
    used_of,
)

PIECE = 1024
LENGTH = 60_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PIECE_BYTES", PIECE)


def rebuild_counts(kind: str, k: int, m: int, lost: Sequence[int]) -> tuple[StripeCode, list]:
    """Bytes of chunks from each member (outer) to each member (inner) in one rebuild."""
    members = k + m
    code = make_code(kind, k, m, [LENGTH] * members)
    views = [make_member(code, n, LENGTH) for n in range(members)]
    peers = range(members)
    results = ThreadWorld(members).run(lambda n, t: encode(code, views[n], t, peers))
    views = [protected(v, r) for v, r in zip(views, results, strict=True)]  # type: ignore[arg-type]
    expected = {n: views[n] for n in lost}
    for number in lost:
        views[number] = make_lost(code)

    def work(number: int, transport: object) -> list[int]:
        counting = CountingTransport(transport)  # type: ignore[arg-type]
        rebuild(code, views[number], counting, peers, lost)
        return counting.to_peers()

    found = ThreadWorld(members).run(work)
    for number, sealed in expected.items():
        assert np.array_equal(used_of(views[number], sealed), used_of(sealed, sealed))
    return code, found


@pytest.mark.parametrize(
    ("shape", "lost"),
    [
        (("xor", 3, 1), [2]),
        (("rs", 4, 2), [0]),
        (("rs", 4, 2), [1, 4]),
        (("rs", 2, 2), [0, 3]),
        (("rs", 3, 3), [0, 2, 4]),
    ],
)
def test_no_link_of_a_rebuild_carries_more_than_its_share(
    shape: tuple[str, int, int], lost: list[int]
) -> None:
    code, sent = rebuild_counts(*shape, lost)
    survivors = [n for n in range(code.members) if n not in lost]
    whole = code.members * code.chunk_bytes
    for target in lost:
        arrived = [sent[n][target] for n in survivors]
        assert sum(arrived) == whole
        assert max(arrived) <= whole / len(survivors) + PIECE
    assert all(not any(sent[n]) for n in lost)
    for number in survivors:
        # Each row needs k-1 pieces at its solver, and gives one to each lost member.
        units = whole * (code.data_members - 1 + len(lost)) / len(survivors)
        most = (code.data_members - 1 + len(lost)) * PIECE
        assert abs(sum(sent[number]) - units) <= most


def padded_member(code: StripeCode, number: int) -> MemberView:
    """With zeros for padding, as ways that are only compared code what lies there."""
    member = make_member(code, number, LENGTH)
    return dataclasses.replace(member, data=coded_of(member))


@pytest.mark.parametrize(("shape"), [("xor", 3, 1), ("rs", 2, 2), ("rs", 4, 2)])
def test_other_ways_make_the_same_parity_and_send_no_less(shape: tuple[str, int, int]) -> None:
    kind, k, m = shape
    members = k + m
    code = make_code(kind, k, m, [LENGTH] * members)
    views = [padded_member(code, n) for n in range(members)]
    ThreadWorld(members).run(lambda n, t: encode(code, views[n], t, range(members)))
    parities = [view.parity.copy() for view in views]
    for name, way in WAYS.items():
        if name == "ring" and kind != "xor":
            continue
        for view in views:
            view.parity[:] = 0

        def work(number: int, transport: object, way=way) -> int:  # type: ignore[no-untyped-def]
            counting = CountingTransport(transport)  # type: ignore[arg-type]
            with SparePieces(code) as spare:
                way(Link(counting, range(members), None), code, views[number], spare)
            return counting.payload

        sent = set(ThreadWorld(members).run(work))
        copies = m if name == "direct" else (members - 1) / k
        assert sent == {code.data_bytes * copies}, name
        assert all(np.array_equal(v.parity, p) for v, p in zip(views, parities, strict=True)), name


MOVED = [("xor", 1, 1), ("xor", 3, 1), ("rs", 2, 2), ("replica", 1, 2)]


@pytest.mark.parametrize("shape", MOVED)
def test_the_transfer_alone_moves_what_an_encode_moves(shape: tuple[str, int, int]) -> None:
    """The same bytes to the same members; a copy lies where an encode leaves it."""
    kind, k, m = shape
    members = k + m
    code = make_code(kind, k, m, [LENGTH] * members)
    views = [padded_member(code, n) for n in range(members)]

    def chunks(counting: CountingTransport) -> dict[tuple[int, MessageKind], int]:
        return {key: size for key, size in counting.sent.items() if key[1] in PAYLOAD}

    def encoded(number: int, transport: Transport) -> dict[tuple[int, MessageKind], int]:
        counting = CountingTransport(transport)
        encode(code, views[number], counting, range(members))
        return chunks(counting)

    def moved(number: int, transport: Transport) -> dict[tuple[int, MessageKind], int]:
        counting = CountingTransport(transport)
        with SparePieces(code) as spare:
            link = Link(counting, range(members), None)
            messages = EncodeMessages(link, code, views[number], spare)
            messages.exchange(messages.give, messages.take)
        return chunks(counting)

    wanted = ThreadWorld(members).run(encoded)
    firsts = [view.parity[: code.chunk_bytes].copy() for view in views]
    for view in views:
        view.parity[:] = 0
    assert ThreadWorld(members).run(moved) == wanted
    if k == 1:
        parities = zip(views, firsts, strict=True)
        assert all(np.array_equal(v.parity[: code.chunk_bytes], p) for v, p in parities)


@pytest.mark.parametrize("transport", [pytest.param(MPI, marks=pytest.mark.mpi), TCP])
def test_a_world_of_the_benchmark_measures(transport: str) -> None:
    """Three members over the real transport; times mean nothing on so little."""
    works = ("encode", "kernel", "transfer", "transfer-cached", "shards:2", "gather")
    works += ("rebuild:0", "into:0")
    found = measure(Plan("xor", 2, 1, 300_000, works, 1, True), transport)
    length = found.memory[0].data_bytes
    assert all(sum(done.to_peers) == length for done in found.one("encode"))
    for work in ("transfer", "transfer-cached"):
        assert all(sum(done.to_peers) == length for done in found.one(work))
    assert [sum(d.to_peers) for d in found.one("into:0")][0] == 0
    assert sum(sum(d.to_peers) for d in found.one("into:0")) == length * 3 // 2
    assert all(sum(done.to_peers) for done in found.one("into:0")[1:]), "one gives it all"
    assert all(seconds > 0 for work in works for seconds in found.seconds(work))
