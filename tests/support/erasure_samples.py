"""Sealed members of a stripe, and worlds to run them in, for the erasure tests."""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.encode import EncodeResult
from megatron_ft.erasure.member import MemberView, StripeCode
from megatron_ft.erasure.stripes import padded_bytes
from megatron_ft.erasure.transport import MessageKind

SNAPSHOT = SnapshotId(3, 14)
META = b"small objects"
GARBAGE = 0xA5
WAIT_SECONDS = 20.0

T = TypeVar("T")


def make_code(
    kind: str, k: int, m: int, lengths: Sequence[int], block_bytes: int = 1024
) -> StripeCode:
    """The code of a stripe whose members have these many bytes of tensors."""
    needed = [required_bytes(length, len(META), block_bytes) for length in lengths]
    return StripeCode(kind, k, m, padded_bytes(needed, k, block_bytes), block_bytes)


def make_member(code: StripeCode, member: int, length: int, **changes: Any) -> MemberView:
    """A sealed member with random tensors of ``length`` bytes; garbage for padding and parity."""
    data = np.full(code.data_bytes, GARBAGE, np.uint8)
    data[:length] = np.random.default_rng(member).integers(0, 256, length, dtype=np.uint8)
    values: dict[str, Any] = {
        "shard_id": f"s{member}",
        "snapshot": SNAPSHOT,
        "iteration": 15,
        "tensor_bytes": length,
        "meta": META,
        "layout_hash": b"h" * 32,
        "block_bytes": code.block_bytes,
    }
    record = seal(data, **(values | changes))
    data.flags.writeable = False
    return dataclasses.replace(make_lost(code), data=data, record=record)


def used_of(member: MemberView, sealed: MemberView) -> Bytes:
    """The bytes of a member up to where ``sealed``, which it was or is to be, has padding."""
    assert sealed.record is not None
    return member.data[: sealed.record.used_bytes]


def coded_of(member: MemberView) -> Bytes:
    """A member's data as it is coded: with zeros for padding."""
    data, used = np.zeros_like(member.data), used_of(member, member)
    data[: used.size] = used
    return data


def make_lost(code: StripeCode) -> MemberView:
    """A member that has lost everything: garbage everywhere."""
    return MemberView(
        np.full(code.data_bytes, GARBAGE, np.uint8),
        np.full(code.parity_bytes, GARBAGE, np.uint8),
        np.full(code.parity_blocks, GARBAGE, np.uint64),
        None,
    )


def protected(member: MemberView, result: EncodeResult) -> MemberView:
    """The member as it is once its SMP has stored what encoding returned."""
    return dataclasses.replace(
        member, parity_root=result.parity_root, stripe_table=result.stripe_table
    )


def writable(member: MemberView) -> MemberView:
    """A copy whose bytes can be damaged."""
    return dataclasses.replace(
        member,
        data=member.data.copy(),
        parity=member.parity.copy(),
        parity_digests=member.parity_digests.copy(),
    )


class ThreadWorld:
    """A world of threads with the strictest manners that MPI allows.

    A send ends only when its receiver waits for it; a buffer that changes before that
    is an error, as are messages of unequal length and messages that nobody received.
    A buffer to receive into holds garbage from the moment it was offered.
    Everyone stops when one member has failed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int, int], deque[_Send]] = defaultdict(deque)
        self.broken = False

    def run(self, work: Callable[[int, ThreadTransport], T]) -> list[T | BaseException]:
        """Each member's result, or what it raised; WorldBroken for those that were let down."""
        results: list[T | BaseException] = [WorldBroken() for _ in range(self.size)]

        def attempt(rank: int) -> None:
            try:
                transport = ThreadTransport(self, rank)
                result = work(rank, transport)
                assert not transport.open, "a transfer was never waited for"
                results[rank] = result
            except BaseException as error:
                results[rank] = error
                with self.changed:
                    self.broken = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=attempt, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        if not self.broken:
            assert not any(self.sends.values()), "a message was never received"
        return results


class WorldBroken(Exception):
    """Another member has failed."""


@dataclasses.dataclass
class _Send:
    buffer: Bytes
    peer: int
    check: int
    done: bool = False


@dataclasses.dataclass
class _Receive:
    buffer: Bytes
    peer: int
    key: tuple[int, int, int]
    done: bool = False


class ThreadTransport:
    """One member's end of a ThreadWorld; counts bytes by kind, and messages in flight.

    ``open`` are transfers that were not waited for.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.sent: dict[MessageKind, int] = defaultdict(int)
        self.most_taken = self.most_offered = 0
        self.on_received: Callable[[MessageKind, Bytes], None] = lambda kind, buffer: None
        self.open: list[_Send | _Receive] = []

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())

    def isend(self, buffer: Bytes, peer: int, tag: int) -> object:
        self.sent[MessageKind(tag >> 12)] += buffer.nbytes
        send = _Send(buffer, peer, zlib.crc32(buffer.data))
        with self._world.changed:
            self._world.sends[self.rank, peer, tag].append(send)
            self._world.changed.notify_all()
        return self._opened(send)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> object:
        buffer[:] = GARBAGE
        return self._opened(_Receive(buffer, peer, (peer, self.rank, tag)))

    def waitall(self, pending: Sequence[object]) -> None:
        receives = [p for p in pending if isinstance(p, _Receive)]
        for receive in receives:
            self._receive(receive)
        for send in pending:
            if isinstance(send, _Send):
                self._wait_for(lambda s=send: s.done)  # type: ignore[misc]
                assert zlib.crc32(send.buffer.data) == send.check, (
                    "a buffer changed while it was sent"
                )
        self.open = [p for p in self.open if not any(p is q for q in pending)]

    def _opened(self, pending: _Send | _Receive) -> object:
        self.open.append(pending)
        taking = sum(isinstance(p, _Receive) and p.buffer.nbytes > 8 for p in self.open)
        self.most_taken = max(self.most_taken, taking)
        offered = sum(isinstance(p, _Send) and p.buffer.nbytes > 8 for p in self.open)
        self.most_offered = max(self.most_offered, offered)
        return pending

    def _receive(self, receive: _Receive) -> None:
        self._wait_for(lambda: bool(self._world.sends[receive.key]))
        with self._world.changed:
            send = self._world.sends[receive.key].popleft()
            assert zlib.crc32(send.buffer.data) == send.check, "it changed while it was sent"
            assert send.buffer.nbytes == receive.buffer.nbytes, "lengths differ"
            receive.buffer[:] = send.buffer
            self.on_received(MessageKind(receive.key[2] >> 12), receive.buffer)
            send.done = True
            self._world.changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._world.changed:
            ready = self._world.changed.wait_for(
                lambda: condition() or self._world.broken, WAIT_SECONDS
            )
            assert ready, "deadlock"
            if not condition():
                raise WorldBroken
