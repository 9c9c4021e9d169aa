"""Sockets of the control plane: keys, Unix and TCP endpoints, one server and one connection.

Processes of one node talk over a Unix socket that only its owner can open.  Processes of
different nodes talk over TCP with CURVE (CurveZMQ, in libzmq), which encrypts and authenticates
both ends.  Both key pairs are derived from one secret of 32 random bytes, so that only the secret
has to be distributed.  A process without it cannot even complete the handshake.

``Server`` (asyncio) and ``Connection`` (blocking) send and receive messages of rpc.messages.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from megatron_ft.core import private_files
from megatron_ft.core.errors import (
    ConfigError,
    ControlPlaneError,
    MegatronFTError,
)
from megatron_ft.rpc.messages import Message, Refused, decode, encode

log = logging.getLogger(__name__)

SECRET_BYTES = 32
MOST_BYTES = 64 << 20
"""Longest frame that is taken: a peer that claims more is cut off before memory is allocated.

The longest of ours hold the stripes of a whole job, some 100 bytes a rank.
"""


@dataclass(frozen=True, repr=False)
class JobKeys:
    """The key pairs of servers (SMPs) and of clients (coordinators), in Z85 text.

    An SMP has both, since encoders of other nodes are its clients.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derive(cls, secret: bytes) -> JobKeys:
        """Key pairs for a secret of SECRET_BYTES bytes; ConfigError for any other length."""
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"the job secret has {len(secret)} bytes instead of {SECRET_BYTES}")
        server, client = (_pair(secret, role) for role in (b"smp", b"coordinator"))
        return cls(*server, *client)

    def listen(self, socket: zmq.Socket[Any], address: str) -> str:
        """Make ``socket`` a CURVE server on a free port of ``address``; returns its endpoint.

        The context needs an authenticator of pyzmq with these keys as its credentials provider.
        """
        socket.maxmsgsize = MOST_BYTES
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret
        socket.bind(f"tcp://{address}:*")
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def connect(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Make ``socket`` a CURVE client that accepts only a server with these keys."""
        socket.maxmsgsize = MOST_BYTES
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret
        socket.connect(endpoint)

    def callback(self, domain: str, key: bytes) -> bool:
        """True if a client with this public key is one of ours (pyzmq's interface)."""
        return key == self.client_public


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return zmq.curve_public(private), private


def listen_local(socket: zmq.Socket[Any], path: Path) -> None:
    """Bind ``socket`` to a Unix socket that only the owner can open (mode 0600).

    A socket file that an earlier SMP left is replaced; the caller holds the folder's
    lock, so no live one is.  UntrustedFileError if the folder is not only this user's.
    """
    private_files.check_folder(path.parent)
    path.unlink(missing_ok=True)
    old = os.umask(0o177)
    try:
        socket.bind(f"ipc://{path}")
    finally:
        os.umask(old)


def connect_local(socket: zmq.Socket[Any], path: Path) -> None:
    """Connect to an SMP's Unix socket; UntrustedFileError if it is not this user's alone.

    ZeroMQ waits for one that is not there yet, in a folder that was checked.
    """
    with suppress(FileNotFoundError):
        private_files.check_socket(path)
    socket.connect(f"ipc://{path}")


Peer = Sequence[bytes]
"""The frames that lead a message to one peer: its identity, and the number of its request."""

Handler = Callable[[Peer, Any], Awaitable[Message | None]]


class Server:
    """Receives messages of any number of peers on one ROUTER socket, and sends to each.

    The caller binds ``socket``.  ``numbered``: a number goes before each message, that of the
    request in its answer, so that answers may come in any order.
    """

    def __init__(
        self, context: zmq.asyncio.Context, *, numbered: bool = False, linger_ms: int = 0
    ) -> None:
        self._leading = 2 if numbered else 1
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = linger_ms
        self.socket.maxmsgsize = MOST_BYTES

    async def serve(self, handle: Handler) -> None:
        """Answer with what ``handle`` returns, one message after the other, until cancelled.

        A frame that is no message, and one that cannot be handled, is refused, never fatal.
        """
        while True:
            *peer, frame = await self.socket.recv_multipart()
            if len(peer) != self._leading:
                continue
            try:
                message = decode(frame)
            except ControlPlaneError as error:
                await self.send(peer, Refused(error))
                continue
            answer = await answered(handle(peer, message), message)
            if answer is not None:
                await self.send(peer, answer)

    def send(self, peer: Peer, message: Message) -> Awaitable[Any]:
        """Send one message to one peer; a peer that has left gets nothing."""
        sent: Awaitable[Any] = self.socket.send_multipart([*peer, encode(message)])
        return sent


async def answered(work: Awaitable[Message | None], request: object) -> Message | None:
    """The result of ``work``, or a refusal that names the error it has raised.

    An unexpected error does not end the owner of the snapshots.  Some effects of the request may
    be missing then; headers are written whole, one after the other, so their content stays true.
    """
    try:
        return await work
    except MegatronFTError as error:
        return Refused(error)
    except Exception as error:
        log.error("%r could not be handled", request, exc_info=error)
        reason = f"{type(error).__name__}: {error}; see the SMP's log"
        return Refused(ControlPlaneError(reason))


class Connection:
    """A blocking connection to one server, in a context of its own.

    ``to`` is the path of a Unix socket, or a TCP endpoint that takes ``keys``.  ``on_lost`` is
    called when the server goes away, from a thread of its own: the owner may be blocked.
    """

    def __init__(
        self,
        to: Path | str,
        keys: JobKeys | None = None,
        *,
        identity: bytes = b"",
        linger_ms: int = 0,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Connect; UntrustedFileError if a Unix socket is not this user's alone."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = linger_ms
        if identity:
            self.socket.identity = identity
        self._watcher: threading.Thread | None = None
        if on_lost is not None:
            events = zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
            work = (self.socket.get_monitor_socket(events), on_lost)
            self._watcher = threading.Thread(target=_watch, args=work, daemon=True)
            self._watcher.start()
        try:
            if isinstance(to, Path):
                connect_local(self.socket, to)
            else:
                assert keys is not None
                keys.connect(self.socket, to)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Hand a message to the socket's own thread."""
        self.socket.send(encode(message))

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The next message; TimeoutError if it does not come in time, None: wait for ever."""
        if not self.socket.poll(None if timeout_seconds is None else int(timeout_seconds * 1000)):
            raise TimeoutError(f"no message in {timeout_seconds:g} s")
        return decode(self.socket.recv())

    def close(self) -> None:
        """Close once all that was sent has left, or after the linger time."""
        if self._watcher is not None:
            self.socket.disable_monitor()
            self._watcher.join()
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _watch(monitor: zmq.Socket[bytes], on_lost: Callable[[], None]) -> None:
    while True:
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.Event.DISCONNECTED:
            on_lost()
        if event == zmq.Event.MONITOR_STOPPED:
            monitor.close(linger=0)
            return
