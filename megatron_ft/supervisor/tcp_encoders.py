"""A group of encoders over TCP.

Each rank is a process that the launcher starts on its node, as it starts SMPs.  The group's secret
goes to their standard inputs; each writes to a file where it listens, and learns through its own
authenticated port where the others do.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.erasure.rank_bootstrap import Listening, RankBootstrap
from megatron_ft.erasure.tcp import EXIT_PEER_GONE
from megatron_ft.erasure.tcp_sockets import send_table
from megatron_ft.erasure.world import RANK_TRANSPORT, TCP
from megatron_ft.launchers.launcher import Launcher, Placement, ProcessHandle
from megatron_ft.launchers.world import WORLD, WORLD_NODES
from megatron_ft.rpc.sockets import SECRET_BYTES

START_SECONDS = 60.0
LOOK_SECONDS = 0.02
LINGER_SECONDS = 10.0


class TcpEncoders:
    """Handle of a world over TCP; see ProcessHandle.

    Ranks write logs of their own, which are put together in ``log_path`` when the world is over.
    """

    def __init__(self, tickets: Sequence[RankBootstrap], log_path: Path) -> None:
        self._tickets, self._log = tickets, log_path
        self._ranks: list[ProcessHandle] = []
        self._over = threading.Event()

    @classmethod
    def start(
        cls, launcher: Launcher, placements: Sequence[Placement], log_path: Path
    ) -> TcpEncoders:
        """Start a world: rank i of it is ``placements[i]``; its secret is made here.

        Raises NodeUnreachable, and MissingEnvironmentError as ``Launcher.start`` does.
        """
        world = placements[0].env.get(WORLD) or uuid.uuid4().hex
        secret, nodes = secrets.token_bytes(SECRET_BYTES), [p.node for p in placements]
        tickets = [
            RankBootstrap(secret, world, rank, len(nodes), launcher.address(node), str(ready))
            for rank, node in enumerate(nodes)
            for ready in [launcher.ready_file(node).with_name(f"{world}.{rank}.json")]
        ]
        marks = {RANK_TRANSPORT: TCP, WORLD: world, WORLD_NODES: ",".join(nodes)}
        made = cls(tickets, log_path)
        try:
            for ticket, (node, argv, env) in zip(tickets, placements, strict=True):
                log, stdin = made._log_of(ticket.rank), msgspec.json.encode(ticket)
                made._ranks.append(launcher.start(node, argv, {**env, **marks}, log, stdin))
        except MegatronFTError:
            made.kill()
            raise
        threading.Thread(target=made._introduce, name=f"world {world}", daemon=True).start()
        return made

    @property
    def pid(self) -> int:
        """Process number of rank 0."""
        return self._ranks[0].pid

    @property
    def node(self) -> str:
        """Empty: it belongs to no node."""
        return ""

    @property
    def start_time(self) -> int:
        """Start time of rank 0."""
        return self._ranks[0].start_time

    def alive(self) -> bool:
        """True while a rank runs."""
        return any(rank.alive() for rank in self._ranks)

    async def wait(self) -> int:
        """0 once all ranks have ended well; else, as soon as one has not, all are ended."""
        waits = [asyncio.ensure_future(rank.wait()) for rank in self._ranks]
        pending = {*waits}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(wait.result() != 0 for wait in done):
                    self._end()
        finally:
            for wait in pending:
                wait.cancel()
        self._clear()
        return world_status([wait.result() for wait in waits])

    def kill(self) -> None:
        """SIGKILL to all ranks, and their files are removed, also for callers that do not wait."""
        self._end()
        self._clear()

    def _end(self) -> None:
        self._over.set()
        for rank in self._ranks:
            rank.kill()

    def _introduce(self) -> None:
        """Tell all ranks where all of them listen, once they do; end the world if one does not."""
        endpoints = [""] * len(self._tickets)
        deadline = time.monotonic() + START_SECONDS
        while not all(endpoints):
            endpoints = [e or _endpoint(t) for e, t in zip(endpoints, self._tickets, strict=True)]
            if self._over.wait(LOOK_SECONDS):
                return
            if time.monotonic() > deadline:
                missing = [rank for rank, endpoint in enumerate(endpoints) if not endpoint]
                # A disk without room for it stops no world.
                with suppress(OSError), self._log_of(0).open("a") as log:
                    log.write(f"ranks {missing} do not listen after {START_SECONDS:.0f} s\n")
                self._end()
                return
        send_table(self._tickets[0].keys(), endpoints, LINGER_SECONDS)

    def _log_of(self, rank: int) -> Path:
        return self._log.with_name(f"{self._log.name}.{self._tickets[0].world}.{rank}")

    def _clear(self) -> None:
        self._over.set()
        for ticket in self._tickets:
            Path(ticket.ready).unlink(missing_ok=True)
            # A log that a full disk has no room for stays where it is: a log stops no recovery.
            with suppress(OSError):
                said = self._log_of(ticket.rank).read_bytes()
                with open(self._log, "ab", opener=lambda p, flags: os.open(p, flags, 0o600)) as log:
                    log.write(said)
                self._log_of(ticket.rank).unlink()


def world_status(statuses: Sequence[int]) -> int:
    """One exit status for a world, from its ranks': of the one that broke it.  Pure.

    Others end because one is gone, or are killed by us then; a first one may be killed, too.
    """
    consequences = {0: 3, EXIT_PEER_GONE: 2, -signal.SIGKILL: 1}
    return min(statuses, key=lambda status: consequences.get(status, 0), default=0)


def _endpoint(ticket: RankBootstrap) -> str:
    """The endpoint of a rank, empty while it has not written it."""
    ready = Path(ticket.ready)
    with suppress(FileNotFoundError):
        if private_files.is_there(ready):
            return msgspec.json.decode(private_files.read_file(ready), type=Listening).endpoint
    return ""
