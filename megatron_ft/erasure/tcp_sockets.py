"""The sockets of one rank of a world over TCP: one that listens, and one to each peer.

Both ends of every connection prove with CURVE (CurveZMQ, in libzmq) that they have the world's
secret, and all that passes is encrypted.  A peer without it gets no further than the handshake.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from megatron_ft.core.isal import Bytes
from megatron_ft.rpc.sockets import JobKeys

IO_THREADS = 2
"""Threads of libzmq that encrypt, send, receive and decrypt."""

CONNECT_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""A peer is gone whose libzmq does not answer a heartbeat for so long; it also answers while the
rank works."""

_REFUSED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED | _REFUSED
)
_HEADER = struct.Struct("<BxxxII")


class FrameType(IntEnum):
    """Kind of a message: the first byte of its header, before the sender's rank and a tag."""

    TABLE = 0
    """Endpoints of all ranks, in JSON; from the supervisor."""
    DATA = 1
    TAKEN = 2
    """A message of the receiver's went into its buffer."""
    LEAVE = 3
    """The sender has nothing more to say or to hear."""


class WorldMessage(NamedTuple):
    """One message; ``body`` is what follows the header."""

    kind: FrameType
    source: int
    tag: int
    body: memoryview


def packed(kind: FrameType, source: int, tag: int = 0) -> bytes:
    """A header."""
    return _HEADER.pack(kind, source, tag)


def send_table(keys: JobKeys, endpoints: Sequence[str], linger_seconds: float) -> None:
    """Tell every rank where all of them listen."""
    table = msgspec.json.encode(list(endpoints))
    with zmq.Context() as context:
        for endpoint in endpoints:
            socket = context.socket(zmq.PUSH)
            socket.linger = int(linger_seconds * 1000)
            keys.connect(socket, endpoint)
            socket.send_multipart([packed(FrameType.TABLE, 0), table])
            socket.close()


def receive_all(
    context: zmq.Context[Any],
    keys: JobKeys,
    address: str,
    on_arrival: Callable[[WorldMessage], None],
    on_error: Callable[[str], None],
) -> tuple[str, Callable[[], None]]:
    """Listen on a free port of ``address`` alone, and hand over every message, in a new thread.

    Gives the endpoint, and a function that ends it; ``context`` must be terminated afterwards.
    """
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=keys)
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = 0  # the senders' credit bounds what waits
    endpoint = keys.listen(socket, address)

    def run() -> None:
        while True:
            try:
                frames = socket.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                socket.close(linger=0)
                return
            try:
                header, body = frames
                kind, source, tag = _HEADER.unpack(header.buffer)
                arrival = WorldMessage(FrameType(kind), source, tag, body.buffer)
            except (ValueError, struct.error) as error:
                on_error(f"a message that is none of ours: {error}")
            else:
                on_arrival(arrival)

    threading.Thread(target=run, name="inbox", daemon=True).start()
    return endpoint, authenticator.stop


class Outlet:
    """The connection to one peer; any thread may send.  ``on_lost`` gets the reason."""

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: JobKeys,
        endpoint: str,
        on_lost: Callable[[str], None],
    ) -> None:
        """Connect; a peer that does not answer is noticed only later."""
        self._lock, self._on_lost, self._messages = threading.Lock(), on_lost, 0
        self._socket = socket = context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.linger = int(HEARTBEAT_SECONDS * 1000)
        socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1000)
        socket.heartbeat_timeout = int(SILENCE_SECONDS * 1000)
        monitor = socket.get_monitor_socket(_EVENTS)
        self._watcher = threading.Thread(
            target=self._watch, args=(monitor,), name=f"watcher of {endpoint}", daemon=True
        )
        self._watcher.start()
        keys.connect(socket, endpoint)

    def send(
        self, kind: FrameType, source: int, tag: int = 0, body: Bytes | bytes = b""
    ) -> tuple[int, zmq.MessageTracker]:
        """Start sending; how many messages with data were sent now, and a tracker.

        The tracker is done when ``body`` is not read any more.
        """
        with self._lock:
            self._messages += kind is FrameType.DATA
            self._socket.send(packed(kind, source, tag), zmq.SNDMORE)
            tracker: zmq.MessageTracker = self._socket.send(body, copy=False, track=True)
            return self._messages, tracker

    def close(self) -> None:
        """Close once all that was sent has left, or after a few seconds."""
        self._socket.disable_monitor()
        self._watcher.join()
        self._socket.close()

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        connected = False
        while True:
            if not monitor.poll(None if connected else int(CONNECT_SECONDS * 1000)):
                self._on_lost(f"cannot be reached for {CONNECT_SECONDS:.0f} s")
                connected = True
                continue
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.Event.MONITOR_STOPPED:
                monitor.close(linger=0)
                return
            if event & _REFUSED:
                self._on_lost("is of another world: it refuses our key")
            elif event == zmq.Event.DISCONNECTED and connected:
                self._on_lost("has closed the connection, or did not answer")
            connected = connected or event == zmq.Event.HANDSHAKE_SUCCEEDED
