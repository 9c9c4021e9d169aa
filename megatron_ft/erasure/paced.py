"""A transport that sends no faster than it was told to, and not in quiet windows."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.isal import Bytes
from megatron_ft.core.pace import Pace
from megatron_ft.erasure.transport import Pending, Transport


class PacedTransport:
    """Another transport, whose ``isend`` waits until ``pace`` allows what was sent before.

    Waiting only delays: peers wait for the message as they would on a slower network, so no
    cycle can form that could not form without it.
    """

    def __init__(self, inner: Transport, pace: Pace) -> None:
        """Several transports of a process may share a pace."""
        self._inner, self._pace = inner, pace

    @property
    def rank(self) -> int:
        """See Transport."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """See Transport."""
        return self._inner.size

    @property
    def bytes_sent(self) -> int:
        """See Transport."""
        return self._inner.bytes_sent

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start sending once that is allowed, and wait until so many bytes are due."""
        self._pace.before()
        pending = self._inner.isend(buffer, peer, tag)
        self._pace.after(buffer.nbytes)
        return pending

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """See Transport."""
        return self._inner.irecv(buffer, peer, tag)

    def waitall(self, pending: Sequence[Pending]) -> None:
        """See Transport."""
        self._inner.waitall(pending)

    def test(self, pending: Sequence[Pending]) -> bool:
        """See Transport."""
        return self._inner.test(pending)
