"""Transfers between encoders: a small interface, and the order in which it is used.

Every member walks through one global sequence of exchanges and takes in at most four messages
at a time; all peers at once would collide at the receivers.  Bytes that exist from the beginning
are offered some turns before their own, and waited for some turns after it, so members need not
keep step.  Waits are always for the oldest exchange or for older sends, so the member that is
waited for can always continue, and no cycle can form.

Waiting has no deadline of its own: MPI cannot give up on one message, and a slow peer is no
error over TCP either.  A world that hangs is ended from outside by the SMP, which loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from megatron_ft.core.background import Pace
from megatron_ft.core.errors import TransportError
from megatron_ft.core.isal import Bytes
from megatron_ft.core.scheme import MAX_MEMBERS

Pending = object
"""A transfer that was started and not waited for; only its transport knows what it is."""

EXCHANGES_IN_FLIGHT = 4
"""Messages that a member takes in at a time; with two, a slow link idles between them."""

TURNS_EARLY = TURNS_LATE = 6
"""Turns by which a send starts before its own, and by which it may finish after it."""


def wrong_length(peer: int, tag: int, arrived: int, awaited: int) -> TransportError:
    """The error of a rank that got a message of another length than it awaited, in bytes."""
    return TransportError(
        f"rank {peer} sent {arrived} bytes with tag {tag}, {awaited} were awaited; "
        "are all encoders of one release?"
    )


class Transport(Protocol):
    """Point-to-point transfers between the processes of one world.

    A buffer must stay as it is until its transfer was waited for.  Transfers between
    two processes with one tag arrive in the order in which they were started.
    """

    rank: int
    """This process."""
    size: int
    """Number of processes of the world."""

    @property
    def bytes_sent(self) -> int:
        """Bytes given to ``isend`` so far."""

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start sending the whole buffer."""

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start receiving exactly the buffer's length."""

    def waitall(self, pending: Sequence[Pending]) -> None:
        """Wait until all these transfers are finished."""

    def test(self, pending: Sequence[Pending]) -> bool:
        """True if all these transfers are finished; does not wait."""


class MessageKind(IntEnum):
    """Kind of a message's content; part of its tag."""

    LENGTH = 0
    BODY = 1
    SOURCE = 2
    RESULT = 3
    DIGEST = 4
    RESHAPE = 5


class Link:
    """A transport as seen by one member of one stripe: peers are member numbers."""

    def __init__(
        self,
        transport: Transport,
        peers: Sequence[int],
        member: int | None,
        pace: Pace | None = None,
    ) -> None:
        """``peers`` are the members' ranks, in stripe order; ``member`` defaults to our rank's.

        With a ``pace`` a send waits until what was sent before is allowed.  That only delays: peers
        wait for the message as they would on a slower network, so no cycle can form.
        ValueError if a rank stands for two members, or if we are none of them.
        """
        self._transport, self._peers, self._pace = transport, tuple(peers), pace
        if len(set(self._peers)) != len(self._peers) and member is None:
            raise ValueError(f"one encoder stands for two members of a stripe: ranks {peers}")
        if transport.rank not in self._peers:
            raise ValueError(f"rank {transport.rank} is no member of the stripe of ranks {peers}")
        self.member = self._peers.index(transport.rank) if member is None else member
        assert self._peers[self.member] == transport.rank, "this member lives in another process"
        assert len(self._peers) <= MAX_MEMBERS, "tags have no room for so many members"

    @property
    def members(self) -> int:
        """N."""
        return len(self._peers)

    def send(self, buffer: Bytes, member: int, kind: MessageKind) -> Pending:
        """Start sending to a member."""
        tag = _tag(kind, self.member, member % self.members)
        pending = self._transport.isend(buffer, self._peers[member % self.members], tag)
        if self._pace is not None:
            self._pace.after(buffer.nbytes)
        return pending

    def receive(self, buffer: Bytes, member: int, kind: MessageKind) -> Pending:
        """Start receiving from a member."""
        tag = _tag(kind, member % self.members, self.member)
        return self._transport.irecv(buffer, self._peers[member % self.members], tag)

    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for all of these."""
        self._transport.waitall(pending)


class Exchange(NamedTuple):
    """Transfers with one peer each way: ``start`` them, and ``then`` what they make possible."""

    start: Callable[[], Sequence[Pending]]
    then: Callable[[], None] | None = None


class ExchangeWindow:
    """A few exchanges in flight, finished in the order in which they were started."""

    def __init__(self, link: Link) -> None:
        """An empty window."""
        self._link = link
        self._flight: deque[tuple[Sequence[Pending], Callable[[], None] | None]] = deque()

    def post(
        self, start: Callable[[], Sequence[Pending]], then: Callable[[], None] | None = None
    ) -> None:
        """Make room, start an exchange, and do ``then`` once it is finished.

        ``start`` runs after older exchanges were finished, so it may send what they made.
        """
        self.settle(EXCHANGES_IN_FLIGHT - 1)
        self._flight.append((start(), then))

    def settle(self, count: int) -> None:
        """Finish the oldest until at most ``count`` are in flight."""
        while len(self._flight) > count:
            self._finish_oldest()

    def drain(self) -> None:
        """Finish everything."""
        self.settle(0)

    def _finish_oldest(self) -> None:
        pending, then = self._flight.popleft()
        self._link.wait(pending)
        if then is not None:
            then()


def buffer_sets(exchanges: int) -> int:
    """Sets of buffers for rows of ``exchanges`` exchanges, so that none in flight is reused."""
    return -(-(EXCHANGES_IN_FLIGHT + exchanges - 1) // exchanges)


class Ahead:
    """Sends that are started some turns early, and waited for some turns late.

    For bytes that are there from the beginning and stay as they are.  A receiver then finds a
    message when it wants one, and a sender continues while its receiver is busy.
    """

    def __init__(self, sends: Iterable[Callable[[], Sequence[Pending]]]) -> None:
        """``sends`` start what is to be sent, in the order of their turns."""
        self._sends = iter(sends)
        self._started: deque[Sequence[Pending]] = deque()
        self._turn = 0

    def due(self) -> Sequence[Pending]:
        """Begin the next turn; returns the sends that must be finished by its end."""
        self._turn += 1
        missing = min(self._turn, TURNS_LATE + 1) + TURNS_EARLY - len(self._started)
        self._started.extend(start() for start in islice(self._sends, missing))
        return self._started.popleft() if self._turn > TURNS_LATE else ()

    def rest(self) -> Sequence[Pending]:
        """Sends that ``due`` has not returned by the last turn."""
        return [pending for started in self._started for pending in started]


def exchange(link: Link, blob: bytes, silent: frozenset[int] = frozenset()) -> Mapping[int, bytes]:
    """Everyone's blob, by member; ``silent`` members only listen, and their blob is left out."""
    lengths = {m: np.zeros(8, np.uint8) for m in range(link.members) if m not in silent}
    mine = np.frombuffer(len(blob).to_bytes(8, "little"), np.uint8)
    _shift(link, mine, lengths, silent, MessageKind.LENGTH)
    bodies = {
        m: np.empty(int.from_bytes(n.tobytes(), "little"), np.uint8) for m, n in lengths.items()
    }
    _shift(link, np.frombuffer(blob, np.uint8), bodies, silent, MessageKind.BODY)
    return {m: body.tobytes() for m, body in bodies.items()} | (
        {} if link.member in silent else {link.member: blob}
    )


def barrier(link: Link) -> None:
    """Return once every member has come here: ceil(log2 N) messages of each member."""
    step = 1
    while step < link.members:
        word, heard = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        link.wait(
            [
                link.receive(heard, link.member - step, MessageKind.LENGTH),
                link.send(word, link.member + step, MessageKind.LENGTH),
            ]
        )
        step *= 2


def _shift(
    link: Link, mine: Bytes, others: Mapping[int, Bytes], silent: frozenset[int], kind: MessageKind
) -> None:
    window, speaks = ExchangeWindow(link), link.member not in silent

    def swap(to: int, source: int) -> list[Pending]:
        started = [link.send(mine, to, kind)] if speaks else []
        if source in others:
            started.append(link.receive(others[source], source, kind))
        return started

    for step in range(1, link.members):
        to, source = (link.member + step) % link.members, (link.member - step) % link.members
        window.post(partial(swap, to, source))
    window.drain()


RESHAPE_TAG = MessageKind.RESHAPE * MAX_MEMBERS**2
"""Tag of a reshape's messages, which are between ranks of a world and not members of a stripe."""


def kind_of(tag: int) -> MessageKind:
    """The kind of a message with this tag."""
    return MessageKind(tag // MAX_MEMBERS**2)


def _tag(kind: MessageKind, source: int, target: int) -> int:
    """Tag of a message: below 32768, so that every MPI has it."""
    return (int(kind) * MAX_MEMBERS + source) * MAX_MEMBERS + target
