"""The messages of an encode without its work: what a transport alone needs for them.

Nothing is coded or checked, and nothing depends on anything: all is there to be sent at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import MemberView, StripeCode, chunk_of
from megatron_ft.erasure.rows import SparePieces
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    Ahead,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
)

Turn = tuple[int, slice, int]
"""Number, part of a chunk and step: N-1 steps a part, first k of sources, then m-1 of results."""


class EncodeMessages:
    """One member's end of the bytes that an encode of its stripe moves, and other ways for them."""

    def __init__(
        self, link: Link, code: StripeCode, member: MemberView, spare: SparePieces
    ) -> None:
        self._link, self._code, self._member = link, code, member
        self._spare, self._results = spare.sets(2, EXCHANGES_IN_FLIGHT)

    def turns(self) -> Iterator[Turn]:
        """All of them, in an order that every member keeps."""
        steps = product(self._code.pieces(), range(self._code.members - 1))
        for number, (part, step) in enumerate(steps):
            yield number, part, step

    def give(self, turn: Turn) -> list[Pending]:
        """A piece of our own chunk to the row that it belongs to, or of a parity to its holder."""
        _, part, step = turn
        code, j = self._code, step - self._code.data_members + 1
        if j > 0:
            made = _one_of(self._results, turn)
            return [self._link.send(made, self._link.member + j, MessageKind.RESULT)]
        target = code.layout.data_row(self._link.member, step)
        mine = chunk_of(code, self._member.data, step)[part]
        return [self._link.send(mine, target, MessageKind.SOURCE)]

    def take(self, turn: Turn) -> list[Pending]:
        """What is kept goes where it is kept, what is coded and then dropped into few pieces."""
        _, part, step = turn
        code, j = self._code, step - self._code.data_members + 1
        if j > 0:
            home = chunk_of(code, self._member.parity, j)[part]
            return [self._link.receive(home, self._link.member - j, MessageKind.RESULT)]
        place = self._member.parity[part] if code.copies_only else self._piece(turn)
        source = code.layout.holder(self._link.member, step)
        return [self._link.receive(place, source, MessageKind.SOURCE)]

    def give_first_chunk(self, turn: Turn) -> list[Pending]:
        """The same chunk to all others in turn: after the first it is in a cache."""
        _, part, step = turn
        mine = chunk_of(self._code, self._member.data, 0)[part]
        return [self._link.send(mine, self._link.member + step + 1, MessageKind.SOURCE)]

    def take_spare(self, turn: Turn) -> list[Pending]:
        """Into pieces that are used again at once."""
        source = self._link.member - turn[2] - 1
        return [self._link.receive(self._piece(turn), source, MessageKind.SOURCE)]

    def exchange(
        self,
        give: Callable[[Turn], list[Pending]],
        take: Callable[[Turn], list[Pending]],
    ) -> None:
        """Move all bytes, with as many messages under way as an encode has."""
        window = ExchangeWindow(self._link)
        given = Ahead(partial(give, turn) for turn in self.turns())
        for turn in self.turns():
            window.post(partial(_both, take, turn, given))
        window.drain()
        self._link.wait(given.rest())

    def _piece(self, turn: Turn) -> Bytes:
        return _one_of(self._spare, turn)


def _one_of(buffers: list[Bytes], turn: Turn) -> Bytes:
    number, part, _ = turn
    return buffers[number % len(buffers)][: part.stop - part.start]


def _both(take: Callable[[Turn], list[Pending]], turn: Turn, given: Ahead) -> list[Pending]:
    return [*take(turn), *given.due()]
