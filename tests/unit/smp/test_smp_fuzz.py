"""A real SMP that is sent anything at all, with and without the secret: it serves afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.identity import Ancestor
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.sockets import MOST_BYTES
from megatron_ft.supervisor.smp_link import SmpLink
from tests.support.message_samples import TYPES, Maker, absent_pid
from tests.support.smp_node import SmpNode, create, run, snapshot

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "6"))
"""More for a long run: FUZZ_ROUNDS=2000 pytest tests/unit/smp/test_smp_fuzz.py."""

FRAMES = 150
ENDING = (m.Retire,)
LEASE_SECONDS = 100_000.0
MOST_GROWTH = 64 << 20
seeds = st.integers(0, (1 << 63) - 1)
few = settings(max_examples=ROUNDS, deadline=None)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmpNode]:
    """An SMP with an arena, led by a coordinator whose lease does not run out."""
    node = SmpNode(tmp_path_factory.mktemp("fuzz"))
    node.start()
    run(lead(node))
    yield node
    node.kill()


async def lead(node: SmpNode) -> None:
    """Be admitted as the next incarnation, and capture, seal and commit as ever."""
    link = await linked(node)
    status = ask(node.environment.socket, m.StatusRequest())
    incarnation = status.incarnation + 1
    # The link of an earlier coordinator may hold the lease; its end is not known to the SMP.
    inventory = await link.demand(m.Admit(incarnation, LEASE_SECONDS), 30)
    assert isinstance(inventory, m.Inventory)
    lineage = (Ancestor(incarnation, None),)
    await link.demand(m.Adopt(incarnation, lineage, None, ("dp0",)), 30)
    await link.demand(create(incarnation=incarnation), 30)
    await link.demand(m.Grant(incarnation, snapshot(1, incarnation), 2), 30)
    await link.demand(m.Abort(incarnation, snapshot(1, incarnation), "seen enough"), 30)
    await let_go(link, incarnation)
    link.close()


async def let_go(link: SmpLink, incarnation: int) -> None:
    """End the lease: the second one counts from the clock that the first was answered with."""
    heard = await link.demand(m.Lease(incarnation, 0.0), 30)
    await link.demand(m.Lease(incarnation, 0.0, heard.clock), 30)


async def linked(node: SmpNode, secret: bytes | None = None) -> SmpLink:
    context = zmq.asyncio.Context.instance()
    return await (node.link(context) if secret is None else node.link(context, secret))


@pytest.fixture(scope="module")
def writers() -> Iterator[tuple[int, ...]]:
    """Processes that may be named as writers, and are killed for it; and some that may not."""
    children = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)
    ]
    yield (*(child.pid for child in children), absent_pid())
    for child in children:
        child.kill()
        child.wait()


def still_serves(node: SmpNode) -> None:
    assert node.process is not None and node.process.poll() is None, node.log.read_text()[-3000:]
    status = ask(node.environment.socket, m.StatusRequest(), 30.0)
    assert status.pid == node.process.pid
    run(lead(node))


def refuses_the_impossible(node: SmpNode) -> None:
    """No frame led to an exception that nobody had thought of."""
    assert "Traceback" not in node.log.read_text(), node.log.read_text()[-5000:]


@few
@given(seed=seeds)
def test_the_unix_socket(node: SmpNode, writers: tuple[int, ...], seed: int) -> None:
    assert node.process is not None
    maker = Maker(seed, (*writers, node.process.pid))
    types = [kind for kind in TYPES if kind is not m.Discard]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 10_000
        dealer.connect(f"ipc://{node.environment.socket}")
        for _ in range(FRAMES):
            frame = maker.frame(types)
            dealer.send_multipart(
                [frame[:5], frame[5:]] if maker.random.random() < 0.1 else [frame]
            )
    still_serves(node)
    refuses_the_impossible(node)


@few
@given(seed=seeds)
def test_the_control_plane_with_the_secret(
    node: SmpNode, writers: tuple[int, ...], seed: int
) -> None:
    """Every message gets an answer, in whatever state."""
    maker = Maker(seed, writers)
    types = [kind for kind in TYPES if kind not in ENDING]

    async def story() -> None:
        link = await linked(node)
        await link.demand(m.Admit(next_incarnation(node), LEASE_SECONDS), 30)
        for _ in range(FRAMES // 3):
            message = maker.valid(types)
            if isinstance(message, m.Lease | m.Admit):
                continue
            assert isinstance(await link.ask(message, 30), m.Message), message
        await link._socket.send_multipart([b"", maker.frame(types)])
        for number in range(20):
            parts = [maker.frame(types) for _ in range(number % 4)]
            await link._socket.send_multipart([b"", *parts])
        await let_go(link, next_incarnation(node) - 1)
        link.close()

    run(story())
    still_serves(node)
    refuses_the_impossible(node)


def next_incarnation(node: SmpNode) -> int:
    return int(ask(node.environment.socket, m.StatusRequest(), 30.0).incarnation) + 1


def endpoint(node: SmpNode) -> tuple[str, int]:
    address = asyncio.run(node.endpoint()).removeprefix("tcp://")
    host, _, port = address.rpartition(":")
    return host, int(port)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
STARTS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32),
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32),
    GREETING + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31),
)
"""First 64 bytes of a peer by ZMTP 3.1 (rfc.zeromq.org/spec/37): signature, version, mechanism."""


@few
@given(seed=seeds)
def test_the_control_plane_without_the_secret(node: SmpNode, seed: int) -> None:
    """Raw bytes: nothing but the greeting comes back, whatever they are."""
    maker = Maker(seed, (1,))
    for start in STARTS:
        with socket.create_connection(endpoint(node), timeout=10) as peer:
            for _ in range(4):
                body = maker.random.randbytes(maker.random.randrange(200))
                length = maker.random.choice([len(body), 0, 1 << 40, (1 << 64) - 1])
                flags = maker.random.choice([0, 1, 2, 4, 6])
                frame = bytes([flags | 2]) + struct.pack(">Q", length) + body
                try:
                    peer.sendall(start + frame)
                except OSError:
                    break
                start = b""
            assert len(everything_from(peer)) <= 300, "more than a greeting and an error"
    still_serves(node)


def everything_from(peer: socket.socket) -> bytes:
    """What is answered until the other side closes, or says nothing for a moment."""
    peer.settimeout(0.05)
    received = b""
    try:
        while more := peer.recv(4096):
            received += more
    except OSError:
        pass
    return received


def test_the_wrong_secret_gets_no_answer(node: SmpNode) -> None:
    async def story() -> None:
        link = await linked(node, bytes(32))
        for request in (m.Admit(99, 1.0), m.StatusRequest(), m.Retire(1, True)):
            with pytest.raises(ControlPlaneError, match="did not answer"):
                await link.ask(request, 0.3)
        link.close()

    run(story())
    still_serves(node)


@pytest.mark.parametrize("claimed", [4 * MOST_BYTES, 1 << 40, (1 << 63) - 1])
def test_memory_is_not_given_for_a_claim(node: SmpNode, claimed: int) -> None:
    """Over the Unix socket and TCP, before and after the handshake of a peer without the secret."""
    assert node.process is not None
    before = psutil.Process(node.process.pid).memory_info()
    length = struct.pack(">Q", claimed)
    null = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    curve = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    unix = socket.socket(socket.AF_UNIX)
    unix.connect(str(node.environment.socket))
    starts = [
        (unix, null + ready + b"\x02"),
        (socket.create_connection(endpoint(node), timeout=10), null + ready + b"\x02"),
        (socket.create_connection(endpoint(node), timeout=10), curve + b"\x06"),
        (socket.create_connection(endpoint(node), timeout=10), curve + b"\x02"),
    ]
    for peer, start in starts:
        most = flood(node, peer, start + length)
        assert most.rss < before.rss + MOST_GROWTH, start
        assert most.vms < before.vms + 4 * MOST_GROWTH, "room was reserved for what was claimed"
    still_serves(node)


def flood(node: SmpNode, peer: socket.socket, start: bytes) -> Any:
    """Send what was claimed until the other side has had enough; its memory when it was most."""
    assert node.process is not None
    process = psutil.Process(node.process.pid)
    most = before = process.memory_info()
    peer.settimeout(1.0)
    try:
        peer.sendall(start)
        while most.rss < before.rss + 2 * MOST_GROWTH:
            peer.sendall(bytes(1 << 20))
            most = max(most, process.memory_info(), key=lambda info: info.rss)
    except OSError:
        most = max(most, process.memory_info(), key=lambda info: info.vms)
    peer.close()
    return most


def test_only_one_port_is_open(node: SmpNode) -> None:
    """What a process of ours listens on is the control plane, which demands the secret."""
    assert node.process is not None
    listening = [
        tuple(one.laddr)
        for one in psutil.Process(node.process.pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM
    ]
    assert listening == [endpoint(node)]


def test_nothing_is_left_of_all_that(node: SmpNode) -> None:
    """Descriptors of peers that are gone are closed."""
    assert node.process is not None
    process = psutil.Process(node.process.pid)
    assert process.num_fds() < 64, process.num_fds()
