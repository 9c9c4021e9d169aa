"""What tests need of a NodeNetwork: whether there can be one, and connections through it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import pytest

from tests.support.namespaces import enter_namespace
from tests.support.node_network import NodeNetwork, unavailable

Result = TypeVar("Result")

needs_network = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "never")
"""Skips where there can be no network of namespaces, and says why."""

PATIENCE_SECONDS = 0.3
"""How long a packet may take that no cut is in the way of."""


def at(network: NodeNetwork, place: str, work: Callable[[], Result]) -> Result:
    """The result of ``work``, done by a thread that is at this place of the network."""
    results: list[Result] = []

    def enter() -> None:
        enter_namespace(network.namespace_path(place))
        results.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return results[0]


@contextmanager
def connection(network: NodeNetwork, one: str, other: str) -> Iterator[tuple[socket.socket, ...]]:
    """Both ends of a TCP connection from one place to another."""
    server = at(network, other, lambda: socket.create_server((network.address(other), 0)))
    with closing(server):
        near = at(network, one, lambda: socket.create_connection(server.getsockname(), 5.0))
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(PATIENCE_SECONDS)
    with closing(near), closing(far):
        yield near, far


def arrives(sender: socket.socket, receiver: socket.socket) -> bool:
    sender.send(b"x")
    try:
        return receiver.recv(1) == b"x"
    except TimeoutError:
        return False


def can_connect(network: NodeNetwork, one: str, other: str) -> bool:
    """Whether a new connection reaches the other place, where nobody listens on the port."""

    def knock() -> bool:
        try:
            socket.create_connection((network.address(other), 9), PATIENCE_SECONDS)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            return False
        raise AssertionError("somebody listens on the discard port")

    return at(network, one, knock)


def seconds_for(send: Callable[[], object]) -> float:
    start = time.monotonic()
    send()
    return time.monotonic() - start
