"""A world over TCP: who gets in, what others can see, and how it ends."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_ft.erasure.rank_bootstrap import Listening, RankBootstrap
from megatron_ft.erasure.tcp import EXIT_PEER_GONE
from megatron_ft.erasure.tcp_sockets import FrameType, packed
from megatron_ft.launchers.launcher import Launcher, Placement
from megatron_ft.rpc.sockets import SECRET_BYTES, JobKeys
from megatron_ft.supervisor import tcp_encoders
from megatron_ft.supervisor.tcp_encoders import TcpEncoders, world_status
from tests.support.erasure_world import ROOT, Here, join

TIMEOUT = 60.0
RANKS = 3


class World:
    """Ranks that have met once and wait to meet again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.here = folder, Here(folder)
        folder.chmod(0o700)
        os.mkfifo(folder / "go")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, str(ROOT / "tests/programs/meeting_rank.py"), str(folder)]
        placements = [Placement(f"n{i}", argv, env) for i in range(RANKS)]
        launcher = cast(Launcher, cast(Any, self.here))
        self.handle = TcpEncoders.start(launcher, placements, folder / "log")
        deadline = time.monotonic() + TIMEOUT
        while len(list(folder.glob("up*"))) < RANKS:
            assert self.handle.alive() and time.monotonic() < deadline, "the world does not start"
            time.sleep(0.02)

    @property
    def tickets(self) -> list[RankBootstrap]:
        return list(self.handle._tickets)

    def endpoint(self, rank: int) -> str:
        said = Path(self.tickets[rank].ready).read_bytes()
        return msgspec.json.decode(said, type=Listening).endpoint

    def meet_again(self) -> int:
        with (self.folder / "go").open("wb"):
            return join(self.handle, TIMEOUT)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.handle.kill()
    join(made.handle, TIMEOUT)


def knock(endpoint: str, keys: JobKeys | None) -> int:
    """Try to send a table of the world that leads elsewhere; the last event of the handshake."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    intruder = context.socket(zmq.PUSH)
    ends = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
    ends |= zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    ends |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    monitor = intruder.get_monitor_socket(ends)
    if keys is None:
        intruder.connect(endpoint)
    else:
        keys.connect(intruder, endpoint)
    intruder.send_multipart([packed(FrameType.TABLE, 0), b'["tcp://127.0.0.1:9"]'])
    intruder.send_multipart([packed(FrameType.DATA, 1, 1), b"x"])
    assert monitor.poll(int(TIMEOUT * 1000)), "no end of the handshake"
    event = recv_monitor_message(monitor)["event"]
    intruder.disable_monitor()
    monitor.close(linger=0)
    context.destroy(linger=0)
    return event


def test_strangers_get_nothing_and_disturb_nobody(world: World) -> None:
    ticket, endpoint = world.tickets[1], world.endpoint(1)
    strangers = {
        "another secret": msgspec.structs.replace(ticket, secret=secrets.token_bytes(SECRET_BYTES)),
        "another world": msgspec.structs.replace(ticket, world="w9"),
        "another size": msgspec.structs.replace(ticket, size=RANKS + 1),
    }
    keys: dict[str, JobKeys | None] = {name: t.keys() for name, t in strangers.items()}
    real, other = ticket.keys(), strangers["another secret"].keys()
    # Who has seen the port's public key, but is no member.
    keys["another client"] = replace(
        real, client_public=other.client_public, client_secret=other.client_secret
    )
    keys["no key"] = None
    for name, key in keys.items():
        assert knock(endpoint, key) != zmq.Event.HANDSHAKE_SUCCEEDED, name
    assert knock(endpoint, real) == zmq.Event.HANDSHAKE_SUCCEEDED, "the test itself is wrong"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n" * 1000)
        plain.settimeout(TIMEOUT)
        with suppress(ConnectionResetError):
            assert len(plain.recv(4096)) <= 64, "more than the greeting"
    with socket.create_connection((host, int(port)), TIMEOUT):
        assert world.meet_again() == 0, (world.folder / "log").read_text()


def test_one_port_a_rank_on_its_address_and_no_secret_to_be_seen(world: World) -> None:
    secret = msgspec.json.encode(world.tickets[0].secret).strip(b'"')
    for rank in world.here.ranks:
        connections = psutil.Process(rank.pid).net_connections("inet")
        listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{rank.pid}/{name}").read_bytes()
    assert secret not in repr(world.tickets).encode()
    assert world.meet_again() == 0, (world.folder / "log").read_text()
    assert sorted(p.name for p in world.folder.iterdir() if p.name.startswith("w")) == [
        f"well{rank}" for rank in range(RANKS)
    ]
    assert not list(world.folder.glob("*.json")) and not list(world.folder.glob("log.*"))


def test_a_rank_that_dies_ends_the_others_without_help(world: World) -> None:
    """Nobody waits for the handle meanwhile, as when the supervisor was killed."""
    os.kill(world.here.ranks[1].pid, signal.SIGKILL)
    assert world.here.ranks[0].join(TIMEOUT) == EXIT_PEER_GONE
    assert world.here.ranks[2].join(TIMEOUT) == EXIT_PEER_GONE
    assert join(world.handle, TIMEOUT) == -signal.SIGKILL
    said = (world.folder / "log").read_text()
    assert "rank 1 at tcp://127.0.0.1:" in said and "closed the connection" in said


def test_a_rank_that_does_not_come_up_is_named_and_ends_the_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_encoders, "START_SECONDS", 3.0)
    tmp_path.chmod(0o700)
    up = [sys.executable, "-c", "from megatron_ft.erasure.world import join_world; join_world"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    placements = [Placement("n0", up, env), Placement("n1", ["sleep", "60"], env)]
    launcher = cast(Launcher, cast(Any, Here(tmp_path)))
    handle = TcpEncoders.start(launcher, placements, tmp_path / "log")
    assert join(handle, TIMEOUT) != 0
    assert "do not listen after 3 s" in (tmp_path / "log").read_text()
    assert "[1]" in (tmp_path / "log").read_text() or "[0, 1]" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([0, 0], 0),
        ([0, 3, 4], 3),
        ([-9, 4, 1], 1),
        ([4, -9, 0], -9),
        ([4, 0], 4),
        ([-9, 0], -9),
        ([], 0),
    ],
)
def test_the_status_is_that_of_whoever_broke_the_world(statuses: list[int], status: int) -> None:
    assert world_status(statuses) == status
