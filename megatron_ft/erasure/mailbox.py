"""Pairs messages that have arrived with buffers that wait for them; knows no network.

Messages that come too early are kept as they came.  A sender stops when ``CREDIT`` of its
messages to one peer were not taken, so what is kept is bounded, whatever a shard's length is.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from megatron_ft.core.errors import TransportError
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.transport import wrong_length

CREDIT = 4
"""How many messages to one peer may be under way beside the one that is waited for."""


class Receive:
    """A buffer that waits for one message; ``done`` once the message is in it."""

    def __init__(self, buffer: Bytes) -> None:
        self.buffer, self.done = buffer, False


class Mailbox:
    """What one rank has to receive, by sender and tag; for any number of threads."""

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        """``on_taken`` is called with a peer each time a message of it went into its buffer."""
        self._on_taken = on_taken
        self._changed = threading.Condition()
        self._posted: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[memoryview]] = defaultdict(deque)
        self._taken: dict[int, int] = defaultdict(int)
        self._failure: TransportError | None = None

    def post(self, peer: int, tag: int, buffer: Bytes) -> Receive:
        """Wait for the peer's next message with this tag, which has the buffer's length."""
        receive = Receive(buffer)
        with self._changed:
            early = self._early[peer, tag]
            if not early:
                self._posted[peer, tag].append(receive)
                return receive
            body = early.popleft()
        self._fill(receive, peer, tag, body)
        return receive

    def arrived(self, peer: int, tag: int, body: memoryview) -> None:
        """A message has come."""
        with self._changed:
            posted = self._posted[peer, tag]
            if not posted:
                self._early[peer, tag].append(body)
                return
            receive = posted.popleft()
        self._fill(receive, peer, tag, body)

    def peer_took(self, peer: int) -> None:
        """The peer has put one more of our messages into its buffer."""
        with self._changed:
            self._taken[peer] += 1
            self._changed.notify_all()

    def fail(self, error: TransportError) -> None:
        """The world is broken: whoever waits, now or later, gets this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def received(self, receive: Receive) -> bool:
        """Whether the buffer is filled; raises what has broken the world."""
        with self._changed:
            return self._unless_broken(receive.done)

    def has_room(self, peer: int, number: int) -> bool:
        """Whether the peer took enough for message ``number`` to it to count as sent."""
        with self._changed:
            return self._unless_broken(self._room(peer, number))

    def wait_received(self, receive: Receive) -> None:
        """Wait until the buffer is filled."""
        with self._changed:
            self._changed.wait_for(lambda: self._unless_broken(receive.done))

    def wait_room(self, peer: int, number: int) -> None:
        """Wait until ``has_room``."""
        with self._changed:
            self._changed.wait_for(lambda: self._unless_broken(self._room(peer, number)))

    def _room(self, peer: int, number: int) -> bool:
        return self._taken[peer] + CREDIT >= number

    def _unless_broken(self, value: bool) -> bool:
        if self._failure is not None:
            raise self._failure
        return value

    def _fill(self, receive: Receive, peer: int, tag: int, body: memoryview) -> None:
        if body.nbytes != receive.buffer.nbytes:
            self.fail(wrong_length(peer, tag, body.nbytes, receive.buffer.nbytes))
            return
        if body.nbytes:
            np.copyto(receive.buffer, np.frombuffer(body, np.uint8))
        # Said before anybody here goes on, who might leave the world.
        self._on_taken(peer)
        with self._changed:
            receive.done = True
            self._changed.notify_all()
