"""Run by test_erasure_transports.py: many stripes in one world, every byte compared.

Stripes of N members use the first N ranks; the others look on.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.stripe.counting import CountingTransport
from megatron_ft.core.errors import TransportError, UnrecoverableError
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure import member as member_module
from megatron_ft.erasure.encode import encode
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.rebuild import rebuild
from megatron_ft.erasure.transport import Link, barrier
from megatron_ft.erasure.world import join_world
from tests.support.erasure_samples import (
    coded_of,
    make_code,
    make_lost,
    make_member,
    protected,
    used_of,
)

WORLD = join_world()
RANK, SIZE = WORLD.transport().rank, WORLD.transport().size


def shapes(size: int) -> Iterator[tuple[str, int, int]]:
    for parity in range(1, min(4, size)):
        yield "rs", size - parity, parity
    yield "xor", size - 1, 1
    yield "replica", 1, size - 1


def lengths(size: int) -> Iterator[list[int]]:
    yield [0] * size
    yield [1] * size
    yield [5003] * size
    yield [(3919 * number) % 6007 for number in range(size)]


def check(kind: str, k: int, m: int, tensor_bytes: list[int], block_bytes: int = 1024) -> int:
    """All losses of one stripe; how many there were."""
    size, me = k + m, RANK
    code = make_code(kind, k, m, tensor_bytes, block_bytes)
    member = make_member(code, me, tensor_bytes[me])
    transport = CountingTransport(WORLD.transport())
    member = protected(member, encode(code, member, transport, range(size)))
    require_least_traffic(code, transport)
    require_reference_parity(code, member, tensor_bytes)
    losses = [c for n in range(1, m + 1) for c in itertools.combinations(range(size), n)]
    for lost in losses:
        rebuild_and_compare(code, member, lost)
    for lost in itertools.combinations(range(size), m + 1):
        try:
            rebuild(code, make_lost(code), WORLD.transport(), range(size), lost)
        except UnrecoverableError:
            continue
        raise AssertionError(f"{lost} of {size} with parity {m} was rebuilt")
    return len(losses)


def require_least_traffic(code: StripeCode, transport: CountingTransport) -> None:
    assert transport.payload == code.data_bytes * (code.members - 1) // (
        code.members - code.parity_members
    )


def require_reference_parity(code: StripeCode, member: MemberView, lengths: list[int]) -> None:
    """Parity as PyECLib or plain XOR has it, from all members' data, rotated by hand."""
    size, k, m, me = code.members, code.data_members, code.parity_members, RANK
    members = [make_member(code, n, length) for n, length in enumerate(lengths)]
    every = np.array([coded_of(one) for one in members])
    chunks = every.reshape(size, k, code.chunk_bytes)
    for j in range(m):
        row = (me - j) % size
        columns = np.array([chunks[(row + m + i) % size, i] for i in range(k)])
        wanted = reference(code, columns, j)
        found = member.parity.reshape(m, code.chunk_bytes)[j]
        assert np.array_equal(wanted, found), f"parity {j} of row {row}"


def reference(code: StripeCode, columns: Bytes, parity: int) -> Bytes:
    if code.kind == "rs":
        from pyeclib.ec_iface import ECDriver

        driver = ECDriver(k=code.data_members, m=code.parity_members, ec_type="isa_l_rs_cauchy")
        fragment = driver.encode(columns.tobytes())[code.data_members + parity]
        return np.frombuffer(fragment, np.uint8)[-code.chunk_bytes :]
    return np.bitwise_xor.reduce(columns)


def rebuild_and_compare(code: StripeCode, member: MemberView, lost: Sequence[int]) -> None:
    view = make_lost(code) if RANK in lost else member
    result = rebuild(code, view, WORLD.transport(), range(code.members), lost)
    assert np.array_equal(used_of(view, member), used_of(member, member)), lost
    assert np.array_equal(view.parity, member.parity), lost
    assert np.array_equal(view.parity_digests, member.parity_digests), lost
    assert result.record == member.record, lost
    assert (result.parity_root, result.stripe_table) == (member.parity_root, member.stripe_table)


def refuse_short_message() -> None:
    """Rank 0 gets three bytes where it awaits five, and says whose they are."""
    transport = WORLD.transport()
    if RANK == 1:
        transport.waitall([transport.isend(np.zeros(3, np.uint8), 0, tag=9)])
    elif RANK == 0:
        receive = transport.irecv(np.zeros(5, np.uint8), 1, tag=9)
        try:
            transport.waitall([receive])
        except TransportError as error:
            assert "rank 1 sent 3 bytes with tag 9, 5 were awaited" in str(error), error
            return
        raise AssertionError("a message that is too short went into the buffer")


def main() -> None:
    cases = 0
    member_module.PIECE_BYTES = 4096
    for size in range(2, SIZE + 1):
        for kind, k, m in shapes(size):
            for tensor_bytes in lengths(size):
                if size > RANK:
                    cases += check(kind, k, m, tensor_bytes)
                barrier(Link(WORLD.transport(), range(SIZE), None))
    member_module.PIECE_BYTES = 1 << 20
    cases += check("rs", SIZE - 2, 2, [9_000_001] * SIZE, 64 << 10)
    refuse_short_message()
    if RANK == 0:
        print(f"all of {cases} losses rebuilt", flush=True)


if __name__ == "__main__":
    try:
        main()
        WORLD.leave()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        WORLD.abort(1)
