"""The transport over MPI.  Importing this module starts MPI in the process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from mpi4py import MPI

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.transport import Pending, wrong_length

_SPIN_SECONDS = 200e-6
"""A wait only yields for this long: on a fast network a piece is there by then."""

_LONGEST_SLEEP = 200e-6

_SMALL = 4096
"""Bytes of a message that may wait at its receiver."""


class _Receive:
    """A buffer that waits for one message; MPI itself accepts one that is too short."""

    def __init__(self, request: MPI.Request, buffer_bytes: int, peer: int, tag: int) -> None:
        self.request, self._awaited = request, buffer_bytes
        self._peer, self._tag = peer, tag
        self._checked = False

    def check(self, status: MPI.Status) -> None:
        """TransportError if the message was too short; a finished request has a status once."""
        if self._checked:
            return
        self._checked = True
        if (arrived := status.Get_count(MPI.BYTE)) != self._awaited:
            raise wrong_length(self._peer, self._tag, arrived, self._awaited)


class MpiTransport:
    """Non-blocking sends and receives of an MPI communicator, by default the whole world.

    Errors of MPI are raised as ``MPI.Exception``, a message that is too short as TransportError;
    after one the world is unusable.
    """

    def __init__(self, communicator: MPI.Intracomm | None = None) -> None:
        """Make the counter start at zero; one communicator may serve many transports."""
        self._communicator = MPI.COMM_WORLD if communicator is None else communicator
        self.rank, self.size = self._communicator.Get_rank(), self._communicator.Get_size()
        self.bytes_sent = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start sending the whole buffer, which may be read-only memory.

        A large one counts as sent only once its receiver has a buffer for it, whatever MPI sends
        ahead: so what it keeps for a slow member is bounded.
        """
        self.bytes_sent += buffer.nbytes
        start = self._communicator.Issend if buffer.nbytes > _SMALL else self._communicator.Isend
        return start([buffer, MPI.BYTE], peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start receiving exactly the buffer's length."""
        request = self._communicator.Irecv([buffer, MPI.BYTE], peer, tag)
        return _Receive(request, buffer.nbytes, peer, tag)

    def waitall(self, pending: Sequence[Pending]) -> None:
        """Wait until all these transfers are finished.

        MPI's own wait spins, on processors that training wants.  This one sleeps once it has
        waited for a while, and then for no more than a quarter of that.
        """
        requests, begin = [_request(transfer) for transfer in pending], time.perf_counter()
        statuses = [MPI.Status() for _ in pending]
        while not MPI.Request.Testall(requests, statuses):
            waited = time.perf_counter() - begin
            time.sleep(0 if waited < _SPIN_SECONDS else min(waited / 4, _LONGEST_SLEEP))
        for transfer, status in zip(pending, statuses, strict=True):
            _check(transfer, status)

    def test(self, pending: Sequence[Pending]) -> bool:
        """True if all these transfers are finished."""
        return all([_finished(transfer) for transfer in pending])


def _request(transfer: Pending) -> MPI.Request:
    return transfer.request if isinstance(transfer, _Receive) else cast(MPI.Request, transfer)


def _check(transfer: Pending, status: MPI.Status) -> None:
    if isinstance(transfer, _Receive):
        transfer.check(status)


def _finished(transfer: Pending) -> bool:
    status = MPI.Status()
    if not _request(transfer).Test(status):
        return False
    _check(transfer, status)
    return True


class MpiWorld:
    """The world that MPI has made when this module was imported."""

    @property
    def library(self) -> str:
        """Name and version of the MPI library."""
        return MPI.Get_library_version().split(",")[0].split("\n")[0].strip(" \0")

    def transport(self) -> MpiTransport:
        """A view of the world with a counter of its own."""
        return MpiTransport()

    def abort(self, code: int) -> None:
        """End all processes of the world at once, whatever they wait for."""
        MPI.COMM_WORLD.Abort(code)

    def leave(self) -> None:
        """Do nothing: MPI ends with the interpreter, and waits for the other ranks."""
