"""Run by test_erasure_transports.py: what counts as sent while its receiver does not take it?

Rank 1 answers a word that was sent behind the pieces, so all that MPI sends ahead is there.
"""

from __future__ import annotations

import sys

import numpy as np

from megatron_ft.erasure.member import PIECE_BYTES
from megatron_ft.erasure.transport import Transport
from megatron_ft.erasure.world import join_world

PIECES, WORD, ANSWER, GO = 1, 2, 3, 4


def pieces() -> list[np.ndarray]:
    return [np.full(PIECE_BYTES, number, np.uint8) for number in range(1, 5)]


def send(transport: Transport) -> None:
    word = np.zeros(1, np.uint8)
    sends = [transport.isend(piece, 1, PIECES) for piece in pieces()]
    # What is small may wait at its receiver.
    transport.waitall([transport.isend(word, 1, WORD)])
    transport.waitall([transport.irecv(word, 1, ANSWER)])
    print(f"{sum(transport.test([one]) for one in sends)} of {len(sends)} count as sent")
    transport.waitall([transport.isend(word, 1, GO), *sends])
    print("all were sent in the end", flush=True)


def take(transport: Transport) -> None:
    word, found = np.zeros(1, np.uint8), [np.zeros_like(piece) for piece in pieces()]
    transport.waitall([transport.irecv(word, 0, WORD)])
    transport.waitall([transport.isend(word, 0, ANSWER)])
    transport.waitall([transport.irecv(word, 0, GO)])
    transport.waitall([transport.irecv(piece, 0, PIECES) for piece in found])
    assert all(map(np.array_equal, found, pieces()))


if __name__ == "__main__":
    world = join_world()
    try:
        (send if world.transport().rank == 0 else take)(world.transport())
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        world.abort(1)
    world.leave()
