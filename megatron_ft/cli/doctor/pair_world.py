"""One rank of the world that measures every pair of nodes, over whatever transport.

``python -m megatron_ft.cli.doctor.pair_world REQUEST`` with a WorldRequest in JSON.  It prints what
it finds line by line, so that what a world knew before it hung is not lost.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_ft.cli.doctor.facts import WorldRank, say
from megatron_ft.core.environment import NODE, NODE_DIR
from megatron_ft.erasure.transport import Pending, Transport
from megatron_ft.erasure.world import join_world

POLL_SECONDS = 0.001
SHARE = 0.2
"""Share of a pair's time after which no further message is begun."""

_MEETING = 1 << 14
"""A tag above those of all rounds."""


class WorldRequest(msgspec.Struct, frozen=True):
    """Work of the world; without ``rounds`` every rank meets every other.

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


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This rank is in a world; ``pid`` is its number on its node."""

    node: str
    pid: int
    rank: WorldRank
    size: int


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each of ``count`` meets every other exactly once.

    The circle method: one stays, the others go round; with an odd number one pauses.
    """
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]


class PairMeter:
    """Measures this rank's pairs, and passes each result to ``emit``.

    Transfers that were given up are kept: their buffers may still be written to.
    """

    def __init__(
        self, transport: Transport, request: WorldRequest, emit: Callable[[Measured], None]
    ) -> None:
        self._transport, self._request, self._emit = transport, request, emit
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
                self._emit(Measured(rank, partner, self._measure(partner, number, deadline)))

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
            # A rank that waits for a partner leaves the core to those that are measured.
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


def fabric(environment: Any = os.environ) -> str:
    """The settings of MPI that concern the network; MPI itself shows nothing of it."""
    names = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mtl",
             "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD")  # fmt: skip
    return ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))


def main() -> None:
    """Join, say so, measure, and leave."""
    request = msgspec.json.decode(sys.argv[1], type=WorldRequest)
    world = join_world()
    transport, (device, inode) = world.transport(), _marker(request.token)
    rank = WorldRank(world.library, fabric(), device, inode)
    say(Joined(os.environ.get(NODE, ""), os.getpid(), rank, transport.size))
    rounds = request.rounds or round_robin(transport.size)
    meter = PairMeter(transport, request, say)
    meet(transport, request.pair_seconds)
    meter.run(rounds)
    if not meet(transport, len(rounds) * request.pair_seconds):
        # MPI would wait in its end for the messages that nobody answers.
        os._exit(0)
    world.leave()


def _marker(token: str) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(os.environ[NODE_DIR], token))
    except (KeyError, OSError):
        return 0, 0
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    main()
