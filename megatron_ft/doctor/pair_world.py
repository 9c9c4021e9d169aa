"""One rank of the MPI world that measures every pair of nodes.

``python -m megatron_ft.doctor.pair_world REQUEST`` with a WorldRequest in JSON.  What it
finds is printed line by line, so that a world that hangs has told what it knew.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_ft.doctor.answer import say
from megatron_ft.doctor.facts import WorldRank
from megatron_ft.doctor.pairs import round_robin
from megatron_ft.environment import NODE, NODE_DIR

POLL_SECONDS = 0.001
SHARE = 0.2
"""Of a pair's time, after which no further message is begun."""


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


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This rank is in a world; ``pid`` is its number on its node."""

    node: str
    pid: int
    rank: WorldRank
    size: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Bytes a second in one direction between this rank and another, 0 for no answer."""

    rank: int
    partner: int
    rate: float


class PairMeter:
    """Measures this rank's pairs.  Requests that were given up are kept: MPI still owns them."""

    def __init__(self, comm: Any, request: WorldRequest) -> None:
        self._comm, self._request = comm, request
        self._outgoing = np.zeros(request.message_bytes, np.uint8)
        self._incoming = np.zeros(request.message_bytes, np.uint8)
        self.given_up: list[Any] = []

    def run(self, rounds: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Measure this rank's pair in each round.

        The time of a round counts from the common start: who was held up by a rank that does
        not answer is still awaited by the next one.
        """
        start, rank = time.monotonic(), self._comm.Get_rank()
        for number, pairs in enumerate(rounds):
            partners = [sum(pair) - rank for pair in pairs if rank in pair]
            for partner in partners:
                deadline = start + (number + 1) * self._request.pair_seconds
                say(Measured(rank, partner, self._measure(partner, number, deadline)))

    def _measure(self, partner: int, tag: int, deadline: float) -> float:
        """Bytes a second in one direction; a slow pair is given up early, with its rate.

        The lower rank says in the first byte of each message whether another one follows.
        """
        if not self._exchange(partner, tag, slice(0, 1), deadline, True):
            return 0.0
        leads, done, more = self._comm.Get_rank() < partner, 0, True
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
        requests = [
            self._comm.Irecv([into, into.nbytes, self._byte], source=partner, tag=tag),
            self._comm.Isend([out, out.nbytes, self._byte], dest=partner, tag=tag),
        ]
        while not all([request.Test() for request in requests]):
            if time.monotonic() > deadline:
                self.given_up += requests
                # They may still be written to, so they are not used again.
                self._outgoing, self._incoming = self._outgoing.copy(), self._incoming.copy()
                return False
            # Who waits for a partner leaves the core to those that are measured.
            time.sleep(POLL_SECONDS if patient else 0)
        return True

    @property
    def _byte(self) -> Any:
        from mpi4py import MPI

        return MPI.BYTE


def fabric(environment: Any = os.environ) -> str:
    """What the settings of MPI say about the network; MPI itself does not tell."""
    names = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mtl",
             "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD")  # fmt: skip
    return ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))


def main() -> None:
    """Join, say so, measure, and leave."""
    request = msgspec.json.decode(sys.argv[1], type=WorldRequest)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip(" \0")
    device, inode = _marker(request.token)
    joined = WorldRank(library, fabric(), device, inode)
    say(Joined(os.environ.get(NODE, ""), os.getpid(), joined, comm.Get_size()))
    meter, rounds = PairMeter(comm, request), request.rounds or round_robin(comm.Get_size())
    _meet(comm, request.pair_seconds)
    meter.run(rounds)
    if not _meet(comm, len(rounds) * request.pair_seconds):
        # MPI would wait in its end for the messages that nobody answers.
        os._exit(0)


def _meet(comm: Any, seconds: float) -> bool:
    """Wait for all ranks, False if one is missing; asleep, where MPI would keep a core busy."""
    barrier, deadline = comm.Ibarrier(), time.monotonic() + seconds
    while not barrier.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(5 * POLL_SECONDS)
    return True


def _marker(token: str) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(os.environ[NODE_DIR], token))
    except (KeyError, OSError):
        return 0, 0
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    main()
