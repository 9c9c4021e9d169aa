"""Measures what passes between this rank of a world and others, over whatever transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from megatron_ft.erasure.transport import Pending, Transport

POLL_SECONDS = 0.001
SHARE = 0.2
"""Of a pair's time, after which no further message is begun."""

_MEETING = 1 << 14
"""A tag above those of all rounds."""


class WorldRequest(msgspec.Struct, frozen=True):
    """What the world does; without ``rounds`` every rank meets every other.

    ``pair_seconds`` is how long one pair may take; ``exchanges`` messages of
    ``message_bytes`` go both ways.
    """

    token: str
    rounds: list[list[tuple[int, int]]] = []
    message_bytes: int = 4 << 20
    exchanges: int = 8
    pair_seconds: float = 5.0


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Bytes a second in one direction between this rank and another, 0 for no answer."""

    rank: int
    partner: int
    rate: float


class PairMeter:
    """Measures this rank's pairs, and tells each result to ``say``.

    Transfers that were given up are kept: their buffers may still be written to.
    """

    def __init__(
        self, transport: Transport, request: WorldRequest, say: Callable[[Measured], None]
    ) -> None:
        self._transport, self._request, self._say = transport, request, say
        self._outgoing = np.zeros(request.message_bytes, np.uint8)
        self._incoming = np.zeros(request.message_bytes, np.uint8)
        self.given_up: list[Pending] = []

    def run(self, rounds: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Measure this rank's pair in each round.

        The time of a round counts from the common start: who was held up by a rank that does
        not answer is still awaited by the next one.
        """
        start, rank = time.monotonic(), self._transport.rank
        for number, pairs in enumerate(rounds):
            partners = [sum(pair) - rank for pair in pairs if rank in pair]
            for partner in partners:
                deadline = start + (number + 1) * self._request.pair_seconds
                self._say(Measured(rank, partner, self._measure(partner, number, deadline)))

    def _measure(self, partner: int, tag: int, deadline: float) -> float:
        """Bytes a second in one direction; a slow pair is given up early, with its rate.

        The lower rank says in the first byte of each message whether another one follows.
        """
        if not self._exchange(partner, tag, slice(0, 1), deadline, True):
            return 0.0
        leads, done, more = self._transport.rank < partner, 0, True
        begin = time.perf_counter()
        while more:
            spent = time.perf_counter() - begin
            last = done + 1 >= self._request.exchanges or spent > SHARE * self._request.pair_seconds
            self._outgoing[0] = leads and not last
            if not self._exchange(partner, tag, slice(None), deadline):
                return 0.0
            more = bool((self._outgoing if leads else self._incoming)[0])
            done += 1
        return done * self._request.message_bytes / (time.perf_counter() - begin)

    def _exchange(
        self, partner: int, tag: int, part: slice, deadline: float, patient: bool = False
    ) -> bool:
        """Send and receive a part of the buffers; False if that is not done by the deadline."""
        out, into = self._outgoing[part], self._incoming[part]
        transfers = [
            self._transport.irecv(into, partner, tag),
            self._transport.isend(out, partner, tag),
        ]
        while not self._transport.test(transfers):
            if time.monotonic() > deadline:
                self.given_up += transfers
                # They may still be written to, so they are not used again.
                self._outgoing, self._incoming = self._outgoing.copy(), self._incoming.copy()
                return False
            # Who waits for a partner leaves the core to those that are measured.
            time.sleep(POLL_SECONDS if patient else 0)
        return True


def meet(transport: Transport, seconds: float) -> bool:
    """Wait for all ranks, False if one is missing; asleep, where MPI would keep a core busy."""
    deadline, first = time.monotonic() + seconds, transport.rank == 0
    others = range(1, transport.size) if first else [0]
    here = [np.zeros(1, np.uint8) for _ in others]
    arriving = [transport.irecv(b, o, _MEETING) for b, o in zip(here, others, strict=True)]
    if first and not _done(transport, arriving, deadline):
        return False
    sending = [transport.isend(np.ones(1, np.uint8), other, _MEETING) for other in others]
    return _done(transport, [*arriving, *sending], deadline)


def _done(transport: Transport, transfers: Sequence[Pending], deadline: float) -> bool:
    while not transport.test(transfers):
        if time.monotonic() > deadline:
            return False
        time.sleep(5 * POLL_SECONDS)
    return True
