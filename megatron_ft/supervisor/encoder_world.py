"""The disposable world of encoders: its transport, its processes, and a new one when it ends.

Over TCP each rank is a process that the launcher starts on its node, as it starts SMPs.  The
world's secret goes to their standard inputs; each writes to a file where it listens, and learns
through its own authenticated port where the others do.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.errors import MegatronFTError, NoMpiError
from megatron_ft.core.process_tools import last_word, log_size
from megatron_ft.erasure.rank_bootstrap import Listening, RankBootstrap
from megatron_ft.erasure.tcp import EXIT_PEER_GONE
from megatron_ft.erasure.tcp_sockets import send_table
from megatron_ft.erasure.worker import ENCODE_RATE
from megatron_ft.erasure.world import MPI, RANK_TRANSPORT, TCP
from megatron_ft.launchers.launcher import Launcher, Placement, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.world import WORLD, WORLD_NODES
from megatron_ft.rpc.sockets import SECRET_BYTES
from megatron_ft.supervisor.expected_world import ExpectedWorld
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.spec import JobSpec

AUTO = "auto"
TRANSPORTS = (AUTO, MPI, TCP)


class WorldStarter:
    """Starts worlds through a launcher over the transport that is wished: one of TRANSPORTS.

    ``auto`` is MPI where one can be loaded, else TCP.  An MPI that is there and does not work
    is an error all the same: it is for `megatron-ft doctor` to find out on which node.
    ``no_mpi`` is the reason why there is none, once it is known.
    """

    def __init__(self, launcher: Launcher, wish: str = AUTO) -> None:
        self._launcher, self._wish = launcher, wish
        self.no_mpi = ""

    @property
    def over_tcp(self) -> bool:
        """True if worlds use TCP, as far as is known."""
        return self._wish == TCP or bool(self.no_mpi)

    def describe(self) -> str:
        """Describe for the log why TCP is used."""
        why = f"no MPI can be loaded: {self.no_mpi}" if self.no_mpi else "--transport asks for it"
        return f"encoders use TCP, encrypted and authenticated; {why}"

    def check(self, ranks: int) -> None:
        """Choose, and prove that an MPI that is to be used starts a world of so many ranks.

        Raises MpiError if it does not, or if there is none and the wish is MPI.
        """
        if not self.over_tcp:
            try:
                self._launcher.check_world(ranks)
            except NoMpiError as error:
                self._settle_without(error)

    def start(self, placements: Sequence[Placement], log_path: Path) -> ProcessHandle:
        """Start one world: rank i of it is ``placements[i]``; see Launcher.start_world."""
        if not self.over_tcp:
            try:
                marked = [p._replace(env={**p.env, RANK_TRANSPORT: MPI}) for p in placements]
                return self._launcher.start_world(marked, log_path)
            except NoMpiError as error:
                self._settle_without(error)
        return TcpWorldProcess.start(self._launcher, placements, log_path)

    def _settle_without(self, error: NoMpiError) -> None:
        if self._wish == MPI:
            raise error
        self.no_mpi = str(error)


class WorldAhead(NamedTuple):
    """A world that was started ahead, for these nodes and this incarnation."""

    nodes: tuple[str, ...]
    incarnation: int
    name: str
    handle: ProcessHandle


class EncoderWorld:
    """The disposable world: started over the active nodes, again whenever it breaks."""

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._spec = spec
        self.starter = WorldStarter(launcher, spec.settings.transport)
        self._log, self._log_begin = spec.log_dir / "encoders.log", 0
        self._handle: ProcessHandle | None = None
        self.ahead: WorldAhead | None = None
        self.name = ""

    def start(self, nodes: Sequence[str], incarnation: int) -> str:
        """Start a world with these nodes as ranks 0, 1, ...; returns its name."""
        self.kill()
        self.name, self._handle = self._start(nodes, incarnation)
        return self.name

    def start_ahead(self, nodes: Sequence[str], incarnation: int) -> str:
        """Start one for an incarnation to come, beside the present one; its name."""
        self.drop_ahead()
        name, handle = self._start(nodes, incarnation)
        self.ahead = WorldAhead(tuple(nodes), incarnation, name, handle)
        return name

    def take_ahead(self, nodes: Sequence[str], incarnation: int) -> bool:
        """Use the world that was started ahead, if it runs and is for these; else end it."""
        ahead = self.ahead
        if ahead is None or ahead[:2] != (tuple(nodes), incarnation) or not ahead.handle.alive():
            self.drop_ahead()
            return False
        self.kill()
        self.name, self._handle, self.ahead = ahead.name, ahead.handle, None
        return True

    def drop_ahead(self) -> None:
        """End the world that was started ahead, if there is one."""
        if self.ahead is not None:
            self.ahead.handle.kill()
            self.ahead = None

    def _start(self, nodes: Sequence[str], incarnation: int) -> tuple[str, ProcessHandle]:
        name = f"w{incarnation}-{uuid.uuid4().hex[:6]}"
        argv = [sys.executable, "-m", "megatron_ft.erasure.worker", "--world", name]
        environment = {**base_environment(), INCARNATION: str(incarnation), "OMP_NUM_THREADS": "1"}
        environment[ENCODE_RATE] = str(self._spec.settings.encode_bandwidth_mib * (1 << 20))
        placements = [Placement(node, argv, environment) for node in nodes]
        self._log_begin = log_size(self._log)
        return name, self.starter.start(placements, self._log)

    async def ended(self) -> int:
        """Wait until the world is gone; its exit status."""
        assert self._handle is not None
        return await self._handle.wait()

    def why_ended(self, status: int) -> str:
        """The last line of its log; ``status`` is what ``ended`` gave."""
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}; {self._log} says: {last_word(self._log, self._log_begin)}"

    def end(self, name: str) -> None:
        """End the world if that is its name; ``ended`` returns once its processes are gone."""
        if self._handle is not None and name == self.name:
            self._handle.kill()

    def kill(self) -> None:
        """End the world, if there is one, and forget it."""
        self.end(self.name)
        self._handle = None


PREPARE_SECONDS = 10.0
"""Longest wait for a world that is started ahead."""

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0

_NUMBER = re.compile(r"\b\d+\b")
"""Process numbers and counts make no cause another one."""


class WorldKeeper:
    """Starts a world over the active nodes, and a new one whenever it ends.

    ``expected`` learns which world to expect.  A world that cannot be started degrades
    protection, visibly, and stops nothing.
    """

    def __init__(self, encoders: EncoderWorld, expected: ExpectedWorld, fleet: Fleet) -> None:
        self.encoders, self._expected, self._fleet = encoders, expected, fleet
        self._task: asyncio.Task[None] | None = None
        self._emitted = ""

    @property
    def wanted(self) -> bool:
        """True while a world is being kept."""
        return self._task is not None

    def start(self, nodes: Sequence[str]) -> None:
        """Keep a world over ``nodes`` from now on.  Raises if the first cannot be started."""
        self._emitted = ""
        if not self.encoders.take_ahead(nodes, self._fleet.incarnation):
            self.stop()
            self._launch(nodes)
        self._expected.expect_ahead("")
        self._task = asyncio.create_task(self._keep(nodes))

    async def prepare(self, nodes: Sequence[str]) -> None:
        """Start a world for the next incarnation now; returns when it is up, or in vain.

        Its encoders wait to be admitted, and have no arena before.  The present world works on.
        ``start`` for these nodes takes it.
        """
        try:
            name = self.encoders.start_ahead(nodes, self._fleet.incarnation + 1)
        except (MegatronFTError, OSError) as error:
            self._emit("world_refused", f"no encoder world was started ahead: {error}")
            return
        self._expected.expect_ahead(name)
        deadline = time.monotonic() + PREPARE_SECONDS
        while self._expected.ahead_on < set(nodes) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)

    def drop_prepared(self) -> None:
        """End the world of ``prepare``; another one is started when it is needed."""
        self.encoders.drop_ahead()
        self._expected.expect_ahead("")

    def stop(self) -> None:
        """End the world; no other is started.  One that was prepared is expected from now on."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.encoders.kill()
        self._expected.lost()
        if ahead := self.encoders.ahead:
            self._expected.expect(ahead.name, ahead.nodes)

    def _launch(self, nodes: Sequence[str]) -> None:
        name = self.encoders.start(nodes, self._fleet.incarnation)
        self._expected.expect(name, tuple(nodes))

    async def _keep(self, nodes: Sequence[str]) -> None:
        delay = FIRST_DELAY_SECONDS
        while True:
            begun = time.monotonic()
            status = await self._until_over()
            if time.monotonic() - begun > LONGEST_DELAY_SECONDS:
                # It did its work: one that broke days ago proves nothing about the next.
                delay = FIRST_DELAY_SECONDS
            self._expected.lost()
            self._explain(status)
            started = False
            while not started:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
                started = self._try(nodes)

    async def _until_over(self) -> int:
        """Wait until the world is gone, and end it if it is not up in time; its exit status.

        A start may hang: mpirun's, for one.
        """
        up = asyncio.create_task(self._expected.ready())
        ended = asyncio.create_task(self.encoders.ended())
        try:
            await asyncio.wait({up, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and (error := up.exception()) is not None:
                self._expected.end(self.encoders.name, str(error))
            return await ended
        finally:
            up.cancel()
            ended.cancel()

    def _try(self, nodes: Sequence[str]) -> bool:
        try:
            self._launch(nodes)
        except (MegatronFTError, OSError) as error:
            self._emit("world_refused", f"no encoder world, snapshots stay local: {error}")
            return False
        return True

    def _explain(self, status: int) -> None:
        """Emit why the world ended; of worlds that never were up each cause only once."""
        why = self._expected.refused or self.encoders.why_ended(status)
        if self._expected.joined:
            self._emitted = ""
        text = f"the encoder world ended: {why}; a new one is started"
        self._emit("world_ended", text)

    def _emit(self, kind: str, text: str) -> None:
        """Emit this unless it was the last event and no world was up since."""
        alike = _NUMBER.sub("0", text)
        if alike != self._emitted:
            self._emitted = alike
            self._fleet.observers.emit(kind, text)


START_SECONDS = 60.0
LOOK_SECONDS = 0.02
LINGER_SECONDS = 10.0


class TcpWorldProcess:
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
    ) -> TcpWorldProcess:
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
