"""Ways to make a stripe's parity, without digests: ours, direct sends and a ring of XORs.

All give the parity that the product gives.  Only the first is in the product, where every
piece is checked besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.rows import (
    SparePieces,
    gather_rows,
)
from megatron_ft.erasure.transport import (
    Exchange,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    buffer_sets,
)


def gathered(link: Link, code: StripeCode, member: MemberView, spare: SparePieces) -> None:
    """Each row comes together at one member, which codes all m parities and passes m-1 on."""
    kernel = code.codec().encode_kernel()
    into = chunk_of(code, member.parity, 0) if code.copies_only else None
    results = spare.sets(2, code.parity_members - 1)

    def outputs(number: int, part: slice) -> list[Bytes]:
        if into is not None:
            return [into[part]] * (code.parity_members - 1)
        return [piece[: part.stop - part.start] for piece in results[number % 2]]

    def on_row(number: int, part: slice, columns: Sequence[Bytes]) -> None:
        if into is None:
            kernel(columns, [chunk_of(code, member.parity, 0)[part], *outputs(number, part)])

    def swap(j: int, part: slice, output: Bytes) -> Sequence[Pending]:
        home = chunk_of(code, member.parity, j)[part]
        return [
            link.receive(home, link.member - j, MessageKind.RESULT),
            link.send(output, link.member + j, MessageKind.RESULT),
        ]

    def passes(number: int, part: slice) -> Iterable[Exchange]:
        for j, output in enumerate(outputs(number, part), 1):
            yield Exchange(partial(swap, j, part, output))

    gather_rows(link, code, member.data, lambda *_: None, on_row, passes, spare, into)


def direct(link: Link, code: StripeCode, member: MemberView, spare: SparePieces) -> None:
    """Every chunk goes to all m holders of its row's parity, each of which codes its own."""
    k, layout = code.data_members, code.layout
    codec = code.codec()
    kernels = [codec.kernel([k + j], range(k)) for j in range(code.parity_members)]
    pieces = spare.sets(buffer_sets(k), k)
    window, number = ExchangeWindow(link), 0
    for part in code.pieces():
        for j, kernel in enumerate(kernels):
            columns = [piece[: part.stop - part.start] for piece in pieces[number % len(pieces)]]
            number += 1
            for column in range(k):
                row = layout.data_row(link.member, column)
                source = layout.holder(layout.parity_row(link.member, j), column)
                started = partial(
                    _swap_source, link, columns[column], source,
                    chunk_of(code, member.data, column)[part], layout.holder(row, k + j),
                )  # fmt: skip
                home = chunk_of(code, member.parity, j)[part]
                last = column == k - 1
                window.post(started, partial(kernel, columns, [home]) if last else None)
    window.drain()


def _swap_source(
    link: Link, buffer: Bytes, source: int, mine: Bytes, target: int
) -> Sequence[Pending]:
    return [
        link.receive(buffer, source, MessageKind.SOURCE),
        link.send(mine, target, MessageKind.SOURCE),
    ]


def ring(link: Link, code: StripeCode, member: MemberView, spare: SparePieces) -> None:
    """m = 1 and XOR: a row's partial sum walks from member to member, each adds its chunk."""
    assert code.kind == "xor", "only a XOR can be summed on the way"
    window, k = ExchangeWindow(link), code.data_members
    ((partial_sum, arrived),) = spare.sets(1, 2)
    for part in code.pieces():
        length = part.stop - part.start
        for step in range(k):
            # Column k-1 of a row lies furthest from its parity, going down from member to member.
            mine = chunk_of(code, member.data, k - 1 - step)[part]
            if step:
                mine = np.bitwise_xor(mine, arrived[:length], out=partial_sum[:length])
            home = chunk_of(code, member.parity, 0)[part] if step == k - 1 else arrived[:length]
            window.post(partial(_swap_source, link, home, link.member + 1, mine, link.member - 1))
            window.drain()


WAYS = {"gather": gathered, "direct": direct, "ring": ring}
