"""The transport over TCP, for worlds where no MPI can be loaded.

Every rank listens on one port of its node's address; ranks find each other by a table that the
supervisor sends them.  Messages go through ZeroMQ with CURVE.  gloo would not do: its TLS device
is not in torch's wheels (``GLOO_DEVICE_TRANSPORT=TCP_TLS``: "unsupported gloo device", torch 2.13),
its plain one and torch's TCPStore ask nobody for a secret, and an encoder that imports torch takes
220 MiB instead of 40 and seconds to start.

Messages that come too early are kept as they came.  A sender stops when ``CREDIT`` of its messages
to one peer were not taken, so the kept bytes are bounded, whatever a shard's length is.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
import zmq

from megatron_ft.core import private_files
from megatron_ft.core.errors import TransportError
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.rank_bootstrap import Listening, RankBootstrap
from megatron_ft.erasure.tcp_sockets import IO_THREADS, FrameType, Outlet, WorldMessage, receive_all
from megatron_ft.erasure.transport import Pending, wrong_length
from megatron_ft.rpc.sockets import MOST_BYTES

CREDIT = 4
"""Most messages under way to one peer, beside the one that is waited for."""


class Receive:
    """A buffer that waits for one message; ``done`` once the message is in it."""

    def __init__(self, buffer: Bytes) -> None:
        self.buffer, self.done = buffer, False


class Sent(NamedTuple):
    """A message to a peer by its number, from 1 on; 0 and no tracker for one to this rank."""

    peer: int
    number: int
    tracker: zmq.MessageTracker | None = None


class Mailbox:
    """Messages that one rank receives, by sender and tag; for any number of threads."""

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
        """Take a message that has come."""
        with self._changed:
            posted = self._posted[peer, tag]
            if not posted:
                self._early[peer, tag].append(body)
                return
            receive = posted.popleft()
        self._fill(receive, peer, tag, body)

    def peer_took(self, peer: int) -> None:
        """Note that the peer has put one more of our messages into its buffer."""
        with self._changed:
            self._taken[peer] += 1
            self._changed.notify_all()

    def fail(self, error: TransportError) -> None:
        """Break the world: every wait, now or later, raises this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def is_done(self, transfer: Receive | Sent) -> bool:
        """True if the buffer is filled, or if the peer took enough for the message to count as
        sent; raises the error that has broken the world."""
        with self._changed:
            return self._is_done(transfer)

    def wait(self, transfer: Receive | Sent) -> None:
        """Wait until ``is_done``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done(transfer))

    def _is_done(self, transfer: Receive | Sent) -> bool:
        if self._failure is not None:
            raise self._failure
        if isinstance(transfer, Receive):
            return transfer.done
        return self._taken[transfer.peer] + CREDIT >= transfer.number

    def _fill(self, receive: Receive, peer: int, tag: int, body: memoryview) -> None:
        if body.nbytes != receive.buffer.nbytes:
            self.fail(wrong_length(peer, tag, body.nbytes, receive.buffer.nbytes))
            return
        if body.nbytes:
            np.copyto(receive.buffer, np.frombuffer(body, np.uint8))
        # Said before anybody here continues, who might leave the world.
        self._on_taken(peer)
        with self._changed:
            receive.done = True
            self._changed.notify_all()


TABLE_SECONDS = 120.0
LEAVE_SECONDS = 10.0
EXIT_PEER_GONE = 4
"""Exit status when another rank of the world is gone."""


class TcpWorld:
    """This rank's end of a world over TCP; ``transport`` gives views of it.

    A peer that is gone ends the process: the world is over, as it is with MPI.
    """

    def __init__(self, ticket: RankBootstrap) -> None:
        """Join; TransportError if the supervisor tells of no other ranks."""
        self.rank, self.size, self._keys = ticket.rank, ticket.size, ticket.keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=IO_THREADS)
        self.mailbox = Mailbox(self._tell_taken)
        self._lock, self._outlets = threading.Lock(), dict[int, Outlet]()
        self._endpoints: list[str] = []
        self._joined, self._left = threading.Event(), threading.Condition()
        self._leaving, self._gone = False, set[int]()
        endpoint, self._stop_receiving = receive_all(
            self._context, self._keys, ticket.address, self._arrived, self._broken
        )
        listening = Listening(ticket.world, ticket.rank, endpoint)
        private_files.replace_file(Path(ticket.ready), msgspec.json.encode(listening))
        if not self._joined.wait(TABLE_SECONDS):
            raise TransportError(
                f"rank {self.rank} of world {ticket.world} was not told in {TABLE_SECONDS:.0f} s "
                "where the others are: one of them did not start, or the supervisor ended"
            )

    @property
    def library(self) -> str:
        """Name of the library that moves the bytes, for people."""
        return f"TCP with CURVE (ZeroMQ {zmq.zmq_version()})"

    def transport(self) -> TcpTransport:
        """A view of the world with a counter of its own."""
        return TcpTransport(self)

    def abort(self, code: int) -> None:
        """End this process; the others end because it is gone."""
        os._exit(code)

    def leave(self) -> None:
        """End well; returns once the others that were met want to leave, too."""
        with self._lock:
            self._leaving = True
            met = dict(self._outlets)
        for outlet in met.values():
            outlet.send(FrameType.LEAVE, self.rank)
        with self._left:
            self._left.wait_for(lambda: self._gone >= met.keys(), LEAVE_SECONDS)
        for outlet in self._outlets.values():
            outlet.close()
        self._stop_receiving()
        self._context.term()

    def send(self, buffer: Bytes, peer: int, tag: int) -> Sent:
        """Start sending; see Transport."""
        if buffer.nbytes > MOST_BYTES:
            raise ValueError(f"a message of {buffer.nbytes} bytes; at most {MOST_BYTES} can be")
        if peer == self.rank:
            self.mailbox.arrived(peer, tag, memoryview(buffer.tobytes()))
            return Sent(peer, 0)
        number, tracker = self._outlet(peer).send(FrameType.DATA, self.rank, tag, buffer)
        return Sent(peer, number, tracker)

    def _outlet(self, peer: int) -> Outlet:
        with self._lock:
            if peer not in self._outlets:

                def lost(reason: str) -> None:
                    self._lost(peer, reason)

                endpoint = self._endpoints[peer]
                self._outlets[peer] = Outlet(self._context, self._keys, endpoint, lost)
            return self._outlets[peer]

    def _arrived(self, arrival: WorldMessage) -> None:
        if arrival.kind is FrameType.DATA:
            self.mailbox.arrived(arrival.source, arrival.tag, arrival.body)
        elif arrival.kind is FrameType.TAKEN:
            self.mailbox.peer_took(arrival.source)
        elif arrival.kind is FrameType.LEAVE:
            self._is_gone(arrival.source)
        elif not self._joined.is_set():
            self._endpoints = msgspec.json.decode(arrival.body, type=list[str])
            self._joined.set()

    def _tell_taken(self, peer: int) -> None:
        if peer != self.rank:
            self._outlet(peer).send(FrameType.TAKEN, self.rank)

    def _is_gone(self, peer: int) -> None:
        with self._left:
            self._gone.add(peer)
            self._left.notify_all()

    def _lost(self, peer: int, reason: str) -> None:
        if self._leaving or peer in self._gone:
            self._is_gone(peer)
            return
        # At once, as MPI does: the rank that broke the world says why, and no other is blamed.
        text = f"rank {peer} at {self._endpoints[peer]} {reason}: this encoder leaves"
        print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_PEER_GONE)

    def _broken(self, text: str) -> None:
        self.mailbox.fail(TransportError(f"rank {self.rank} got {text}"))


class TcpTransport:
    """Transfers of a TcpWorld; see Transport.  Messages hold at most MOST_BYTES."""

    def __init__(self, world: TcpWorld) -> None:
        self._world, self.bytes_sent = world, 0
        self.rank, self.size = world.rank, world.size

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start sending the whole buffer, which may be read-only memory."""
        self.bytes_sent += buffer.nbytes
        return self._world.send(buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Pending:
        """Start receiving exactly the buffer's length."""
        return self._world.mailbox.post(peer, tag, buffer)

    def waitall(self, pending: Sequence[Pending]) -> None:
        """Wait until all these transfers are finished; TransportError if the world is over."""
        for transfer in cast(Sequence[Receive | Sent], pending):
            self._world.mailbox.wait(transfer)
            if isinstance(transfer, Sent) and transfer.tracker is not None:
                transfer.tracker.wait()

    def test(self, pending: Sequence[Pending]) -> bool:
        """True if all these transfers are finished."""
        transfers = cast(Sequence[Receive | Sent], pending)
        trackers = [one.tracker for one in transfers if isinstance(one, Sent)]
        moved = all(tracker is None or tracker.done for tracker in trackers)
        return moved and all(self._world.mailbox.is_done(one) for one in transfers)
