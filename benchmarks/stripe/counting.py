"""Bytes that a member sends, by peer and by what they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.transport import MessageKind, Pending, Transport, kind_of

PAYLOAD = (MessageKind.SOURCE, MessageKind.RESULT)
"""What is counted against bounds; records and digests are not."""


class CountingTransport:
    """Another transport; ``sent`` holds the bytes given to it by (peer's rank, kind)."""

    def __init__(self, inner: Transport) -> None:
        """Count from zero."""
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.sent: dict[tuple[int, MessageKind], int] = defaultdict(int)

    @property
    def bytes_sent(self) -> int:
        """See Transport."""
        return self._inner.bytes_sent

    @property
    def payload(self) -> int:
        """Bytes of chunks sent, to whomever."""
        return sum(self.to_peers())

    def to_peers(self) -> list[int]:
        """Bytes of chunks sent to each rank."""
        peers = range(self.size)
        return [sum(self.sent.get((peer, kind), 0) for kind in PAYLOAD) for peer in peers]

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Count, and start sending."""
        self.sent[peer, kind_of(tag)] += buffer.nbytes
        return self._inner.isend(buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """See Transport."""
        return self._inner.irecv(buffer, peer, tag)

    def waitall(self, pending: Sequence[Pending]) -> None:
        """See Transport."""
        self._inner.waitall(pending)

    def test(self, pending: Sequence[Pending]) -> bool:
        """See Transport."""
        return self._inner.test(pending)
