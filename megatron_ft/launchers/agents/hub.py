"""The supervisor's connections to its agents: one authenticated port, served by a thread.

It is a thread, because a Launcher is called outside of the event loop, too, and starts at once.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.agents.rendezvous import SILENT_SECONDS, Meeting
from megatron_ft.launchers.launcher import UNKNOWN_EXIT, NodeUnreachable, ProcessGoneError
from megatron_ft.launchers.world import IN_FOLDER
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import SECRET_BYTES, JobKeys, Peer, Server

ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.5


class AgentProcess:
    """Handle of a process that an agent watches; see ProcessHandle.

    ``send`` sends the node's agent a message; its result is whether the agent is there.
    ``begun`` and ``ended`` are set by the hub, in its thread.
    """

    def __init__(self, node: str, send: Callable[[str, m.Message], bool]) -> None:
        self.id = uuid.uuid4().hex
        self.begun: Future[m.ProcessRuns] = Future()
        self.ended: Future[int] = Future()
        self._node, self._send = node, send

    @property
    def pid(self) -> int:
        return self.begun.result(0).pid

    @property
    def node(self) -> str:
        return self._node

    @property
    def start_time(self) -> int:
        """Kernel clock ticks of its node."""
        return self.begun.result(0).start_time

    async def wait(self) -> int:
        """Its exit status; UNKNOWN_EXIT if its agent was lost, and then it may still run."""
        # A caller that stops waiting leaves the others waiting.
        return await asyncio.shield(asyncio.wrap_future(self.ended))

    def kill(self) -> None:
        """SIGKILL by the agent; where there is none it is given up."""
        if self.alive() and not self._send(self._node, m.KillProcess(self.id)):
            self.end(UNKNOWN_EXIT)

    def alive(self) -> bool:
        """True if the process runs as far as is known here."""
        return not self.ended.done()

    def end(self, status: int) -> None:
        """Record its end; later reports do not count."""
        with suppress(InvalidStateError):
            self.ended.set_result(status)


@dataclass(frozen=True)
class AgentSeat:
    """One node's agent; ``heard`` is the time of its last message, -inf if it has left."""

    rank: int
    address: str
    token: str
    peer: Peer
    heard: float

    @property
    def there(self) -> bool:
        """True if the agent has sent something lately."""
        return time.monotonic() - self.heard < SILENT_SECONDS


class AgentHub:
    """The agents of one job, and all processes that they watch."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of ``address``; ConfigError if it is not of this machine."""
        self.seats: dict[str, AgentSeat] = {}
        """Seats by node, in the order of their first messages."""
        self.problem = ""
        """Reason why the agents cannot be of one job; empty if they can."""
        self._processes: dict[str, AgentProcess] = {}
        self._shells: dict[str, Peer] = {}
        self._news = threading.Condition()
        self._bound: Future[Meeting] = Future()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(address)), name="agents", daemon=True
        )
        self._thread.start()
        self.meeting = self._bound.result()

    def await_agents(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Wait until there are enough; whether there were in time.

        ConfigError when two nodes have the same name.
        """
        with self._news:
            done = self._news.wait_for(lambda: bool(self.problem) or enough(), seconds)
        if self.problem:
            raise ConfigError(self.problem)
        return done

    def there(self, node: str) -> bool:
        return node in self.seats and self.seats[node].there

    def launch(self, node: str, order: Callable[[str], m.Message]) -> AgentProcess:
        """The process that Start or Attach, made with its name, leads to.

        NodeUnreachable without an agent or an answer of it; ProcessGoneError and what else the
        agent says.
        """
        process = AgentProcess(node, self.send)
        self._processes[process.id] = process
        if not self.send(node, order(process.id)):
            self._processes.pop(process.id)
            raise NodeUnreachable(
                f"node {node} has no agent: what started `megatron-ft run` there has ended, or it "
                f"was silent for {SILENT_SECONDS:g} s"
            )
        try:
            process.begun.result(ANSWER_SECONDS)
        except TimeoutError as error:
            # Should it begin after all, it is not wanted.
            process.kill()
            process.end(UNKNOWN_EXIT)
            raise NodeUnreachable(
                f"the agent of node {node} did not answer within {ANSWER_SECONDS:g} s"
            ) from error
        return process

    def end_world(self, job: str, world: str, nodes: Collection[str], seconds: float) -> None:
        """Have all processes of an MPI world ended on these nodes, as far as they are there."""
        orders = []
        for node in nodes:
            done = AgentProcess(node, self.send)
            self._processes[done.id] = done
            if self.send(node, m.EndWorld(done.id, job, world)):
                orders.append(done)
        deadline = time.monotonic() + seconds
        for done in orders:
            with suppress(TimeoutError):
                done.ended.result(max(0.0, deadline - time.monotonic()))

    def send(self, node: str, message: m.Message) -> bool:
        """Send a node's agent a message; False if it is not there."""
        if not self.there(node) or not self._thread.is_alive():
            return False
        self._send(self.seats[node].peer, message)
        return True

    def close(self, code: int) -> None:
        """End all agents with this exit code; harmless the second time."""
        if not self._thread.is_alive():
            return
        for seat in list(self.seats.values()):
            self._send(seat.peer, m.SupervisorBye(code))
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(ANSWER_SECONDS)

    def _send(self, peer: Peer, message: m.Message) -> None:
        self._loop.call_soon_threadsafe(self._server.send, peer, message)

    async def _serve(self, address: str) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        context = zmq.asyncio.Context()
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        self._server = Server(context, linger_ms=1000)
        try:
            keys = JobKeys.derive(self._secret)
            authenticator.configure_curve_callback("*", credentials_provider=keys)
            endpoint = keys.listen(self._server.socket, address)
            self._bound.set_result(Meeting(endpoint, self._secret))
            await self._until_over()
        except zmq.ZMQError as error:
            reason = f"cannot listen for agents on {address}: {error}; give --address"
            self._bound.set_exception(ConfigError(reason))
        finally:
            authenticator.stop()
            self._server.socket.close()
            context.term()

    async def _until_over(self) -> None:
        works = [self._server.serve(self._handle), self._end_silent(), self._over.wait()]
        tasks = [asyncio.ensure_future(work) for work in works]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for process in list(self._processes.values()):
            process.end(UNKNOWN_EXIT)
        for task in done:
            task.result()

    async def _end_silent(self) -> None:
        """Give up the processes of silent nodes; nothing signals that a node is silent."""
        while True:
            for node, seat in self.seats.items():
                if not seat.there:
                    self._end_all_of(node)
            await asyncio.sleep(_POLL_SECONDS)

    async def _handle(self, peer: Peer, message: Any) -> None:
        if isinstance(message, m.AgentHello):
            self._greet(peer, message)
        elif isinstance(message, m.RunShell):
            self._run_shell(peer, message)
        elif isinstance(message, m.AgentGoodbye):
            for node, seat in list(self.seats.items()):
                if seat.peer == peer:
                    self.seats[node] = replace(seat, heard=float("-inf"))
                    self._end_all_of(node)
        elif isinstance(message, m.ProcessRuns | m.ProcessRefused | m.ProcessEnded):
            self._on_report(message)

    def _greet(self, peer: Peer, hello: m.AgentHello) -> None:
        seat = self.seats.get(hello.node)
        if seat is not None and seat.token != hello.token and seat.there:
            reason = (
                f"two nodes are called {hello.node}: start `megatron-ft run` once on each node "
                "(mpirun -npernode 1, torchrun --nproc-per-node 1), or, to try several nodes on "
                "one machine, give each its own --node-name"
            )
            self._send(peer, m.Refused(ConfigError(reason)))
            with self._news:
                self.problem = self.problem or reason
                self._news.notify_all()
            return
        if seat is not None and seat.token != hello.token:
            self._end_all_of(hello.node)
        self._send(peer, m.AgentHeard())
        with self._news:
            now = time.monotonic()
            self.seats[hello.node] = AgentSeat(hello.rank, hello.address, hello.token, peer, now)
            self._news.notify_all()
        for process in self._of(hello.node):
            # Its report of this one was lost on the way.
            if process.begun.done() and process.id not in hello.running:
                process.end(UNKNOWN_EXIT)

    def _on_report(self, message: m.ProcessRuns | m.ProcessRefused | m.ProcessEnded) -> None:
        process = self._processes.get(message.id)
        if process is None:
            return
        if isinstance(message, m.ProcessRuns):
            with suppress(InvalidStateError):
                process.begun.set_result(message)
            return
        self._processes.pop(message.id)
        if isinstance(message, m.ProcessEnded):
            process.end(message.status)
            if shell := self._shells.pop(message.id, None):
                self._send(shell, message)
            return
        with suppress(InvalidStateError):
            error = ProcessGoneError(str(message.error)) if message.gone else message.error
            process.begun.set_exception(error)
        process.end(UNKNOWN_EXIT)
        if shell := self._shells.pop(message.id, None):
            self._send(shell, m.ProcessEnded(message.id, 1))

    def _run_shell(self, peer: Peer, order: m.RunShell) -> None:
        process = AgentProcess(order.node, self.send)
        process.id = order.id
        self._processes[order.id], self._shells[order.id] = process, peer
        argv = ("/bin/sh", "-c", IN_FOLDER, order.folder, order.words)
        start = m.StartProcess(order.id, argv, order.env, order.log)
        if not self.send(order.node, start):
            self._on_report(m.ProcessEnded(order.id, 1))

    def _end_all_of(self, node: str) -> None:
        for process in self._of(node):
            process.end(UNKNOWN_EXIT)
            self._processes.pop(process.id, None)

    def _of(self, node: str) -> list[AgentProcess]:
        return [process for process in list(self._processes.values()) if process.node == node]
