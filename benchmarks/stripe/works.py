"""What a member of a stripe can be timed at, by name: the product's verbs and their yardsticks."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.stripe.counting import CountingTransport
from benchmarks.stripe.messages import EncodeMessages
from benchmarks.stripe.other_ways import WAYS
from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core.background import Pace
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.encode import EncodeResult, encode
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.rebuild import rebuild
from megatron_ft.erasure.rows import SparePieces, held_bytes
from megatron_ft.erasure.stripes import padded_bytes
from megatron_ft.erasure.transport import (
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    Transport,
)

PYECLIB_BYTES = 8 << 20
"""What PyECLib's API is given at a time; with more it slows down."""


def stripe_code(kind: str, k: int, m: int, size: int) -> StripeCode:
    """A stripe whose members have so many bytes of tensors."""
    length = padded_bytes([required_bytes(size, 0, BLOCK_BYTES)], k, BLOCK_BYTES)
    return StripeCode(kind, k, m, length, BLOCK_BYTES)


def sealed_member(code: StripeCode, number: int, size: int) -> MemberView:
    """A member with random tensors and room for its parity."""
    data = np.zeros(code.data_bytes, np.uint8)
    data[:size] = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    record = seal(
        data, shard_id=f"s{number}", snapshot=SnapshotId(1, 1), iteration=1, tensor_bytes=size,
        meta=b"", layout_hash=b"h" * 32, block_bytes=BLOCK_BYTES,
    )  # fmt: skip
    return dataclasses.replace(_empty(code), data=data, record=record)


class Works:
    """One member's end of every work; all members do the same work at the same time.

    Names: ``kernel``, ``transfer`` (an encode's messages), ``transfer-cached`` (as many bytes from
    a cache into a cache), ``encode``, ``shards:N`` (as many bytes in N stripes, one after the
    other), ``paced:BYTES_A_SECOND``, ``pyeclib``, the WAYS, ``rebuild:M,M`` and ``into:M,M`` (the
    bytes that those lost members need, sent to them by the others in even shares).  ``rebuild``
    needs an ``encode`` before it.
    """

    def __init__(self, kind: str, k: int, m: int, size: int, transport: Transport) -> None:
        self.code = stripe_code(kind, k, m, size)
        self._transport = transport
        self.member = sealed_member(self.code, transport.rank, size)
        self._protected: MemberView | None = None
        self._lost = self._rebuilt = _empty(self.code)
        self._shards: list[tuple[StripeCode, MemberView]] = []
        self._size = size
        self._plain = np.zeros(self.code.members * self.code.chunk_bytes, np.uint8)

        self._verbs: dict[str, Callable[..., None]] = {
            "kernel": self._kernel,
            "transfer": self._transfer,
            "transfer-cached": self._transfer_cached,
            "encode": self._encode,
            "shards": self._shards_each,
            "paced": self._paced,
            "pyeclib": self._pyeclib,
            "rebuild": self._rebuild,
            "into": self._into,
        }

    def run(self, name: str, transport: CountingTransport) -> None:
        """Do it once."""
        verb, _, argument = name.partition(":")
        if verb in WAYS:
            with SparePieces(self.code) as spare:
                WAYS[verb](self._link(transport), self.code, self.member, spare)
        else:
            numbers = [int(number) for number in argument.split(",") if number]
            self._verbs[verb](transport, *numbers)

    def memory(self, transport: CountingTransport) -> int:
        """Most bytes that are held beside the member during one encode, kept buffers included."""
        tracemalloc.start()
        try:
            self._encode(transport)
            return tracemalloc.get_traced_memory()[1] + held_bytes()
        finally:
            tracemalloc.stop()

    def require_right_parity(self) -> None:
        """What ran last has made the parity that the product's encode made; RuntimeError if not."""
        assert self._protected is not None, "nothing was encoded yet"
        if not np.array_equal(self.member.parity, self._protected.parity):
            raise RuntimeError("two ways to encode have made different parity")

    def require_right_rebuild(self) -> None:
        """What was rebuilt last has the bytes that were lost; RuntimeError if not."""
        assert self._protected is not None, "nothing was encoded yet"
        wanted = self._protected
        pairs = ((self._rebuilt.data, wanted.data), (self._rebuilt.parity, wanted.parity))
        if not all(np.array_equal(*pair) for pair in pairs):
            raise RuntimeError("a rebuild gave wrong bytes")

    def _encode(self, transport: Transport, pace: Pace | None = None) -> None:
        result = encode(self.code, self.member, transport, range(self.code.members), pace=pace)
        if self._protected is None:
            self._protected = self._after(result)

    def _paced(self, transport: CountingTransport, rate: int) -> None:
        self._encode(transport, Pace(rate))

    def _shards_of(self, count: int) -> list[tuple[StripeCode, MemberView]]:
        code = stripe_code(
            self.code.kind, self.code.data_members, self.code.parity_members, self._size // count
        )
        rank = self._transport.rank
        return [(code, sealed_member(code, rank, self._size // count)) for _ in range(count)]

    def _shards_each(self, transport: CountingTransport, count: int) -> None:
        self._shards = self._shards or self._shards_of(count)
        for code, member in self._shards:
            encode(code, member, transport, range(code.members))

    def _rebuild(self, transport: CountingTransport, *lost: int) -> None:
        assert self._protected is not None, "nothing was encoded yet"
        view = self._lost if transport.rank in lost else self._protected
        rebuild(self.code, view, transport, range(self.code.members), lost)
        self._rebuilt = view

    def _kernel(self, transport: CountingTransport) -> None:
        """Arithmetic alone: as many bytes as a member's, from memory into memory."""
        code, kernel = self.code, self.code.codec().encode_kernel()
        for part in code.pieces():
            data = [chunk_of(code, self.member.data, n)[part] for n in range(code.data_members)]
            out = [chunk_of(code, self._lost.parity, n)[part] for n in range(code.parity_members)]
            kernel(data, out)

    def _transfer(self, transport: CountingTransport) -> None:
        """Transport alone, as the product uses it: an encode's bytes, from and to its places."""
        with SparePieces(self.code) as spare:
            moved = EncodeMessages(self._link(transport), self.code, self.member, spare)
            moved.exchange(moved.give, moved.take)

    def _transfer_cached(self, transport: CountingTransport) -> None:
        """As many bytes, of one chunk only and into pieces that stay in a cache."""
        with SparePieces(self.code) as spare:
            moved = EncodeMessages(self._link(transport), self.code, self.member, spare)
            moved.exchange(moved.give_first_chunk, moved.take_spare)

    def _into(self, transport: CountingTransport, *lost: int) -> None:
        """Transport alone: N chunks for each lost member, in turn from the others."""
        link, code = self._link(transport), self.code
        window = ExchangeWindow(link)
        givers = [n for n in range(code.members) if n not in lost]
        region = self._plain
        units = [
            (n * code.chunk_bytes, part) for part in code.pieces() for n in range(code.members)
        ]
        for number, (start, part) in enumerate(units):
            giver, place = (
                givers[number % len(givers)],
                slice(start + part.start, start + part.stop),
            )
            for target in lost:
                if link.member == target:
                    window.post(partial(_take, link, region[place], giver))
                elif link.member == giver:
                    window.post(partial(_give, link, region[place], target))
        window.drain()

    def _pyeclib(self, transport: CountingTransport) -> None:
        """PyECLib's own encode of as many bytes; it sends nothing."""
        from pyeclib.ec_iface import ECDriver

        k, m = self.code.data_members, self.code.parity_members
        driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
        for at in range(0, self.code.data_bytes, PYECLIB_BYTES):
            driver.encode(self.member.data[at : at + PYECLIB_BYTES].tobytes())

    def _after(self, result: EncodeResult) -> MemberView:
        return dataclasses.replace(
            self.member,
            parity=self.member.parity.copy(),
            parity_root=result.parity_root,
            stripe_table=result.stripe_table,
        )

    def _link(self, transport: Transport) -> Link:
        return Link(transport, range(self.code.members), None)


def _empty(code: StripeCode) -> MemberView:
    """Memory of a member that holds nothing yet; touched, so that no page is faulted in later."""
    lengths = (code.data_bytes, code.parity_bytes)
    data, parity = (np.full(length, 0xA5, np.uint8) for length in lengths)
    return MemberView(data, parity, np.zeros(code.parity_blocks, np.uint64), None)


def _take(link: Link, buffer: Bytes, giver: int) -> list[Pending]:
    return [link.receive(buffer, giver, MessageKind.RESULT)]


def _give(link: Link, piece: Bytes, target: int) -> list[Pending]:
    return [link.send(piece, target, MessageKind.RESULT)]
