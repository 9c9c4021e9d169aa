"""The supervisor's end of its agents: one authenticated port, served by a thread of its own.

A thread, because a Launcher is asked outside of the event loop, too, and starts at once.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core.errors import ConfigError, ControlPlaneError, error_class
from megatron_ft.launchers.agents import messages as m
from megatron_ft.launchers.agents.messages import SILENT_SECONDS, Meeting
from megatron_ft.launchers.agents.process import AgentProcess
from megatron_ft.launchers.launcher import UNKNOWN_EXIT, NodeUnreachable, ProcessGoneError
from megatron_ft.launchers.world import IN_FOLDER
from megatron_ft.rpc.message_base import MOST_BYTES
from megatron_ft.rpc.security import SECRET_BYTES

ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class AgentSeat:
    """One node's agent, as it said last; ``heard`` is our monotonic time, -inf if it has left."""

    rank: int
    address: str
    token: str
    identity: bytes
    heard: float

    @property
    def there(self) -> bool:
        """Whether it was heard of lately."""
        return time.monotonic() - self.heard < SILENT_SECONDS


class AgentHub:
    """Knows the agents of one job, and all processes that they watch."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of ``address``; ConfigError if it is not of this machine."""
        self.seats: dict[str, AgentSeat] = {}
        """By node, in the order in which nodes were heard of first."""
        self.problem = ""
        """Why the agents cannot be of one job."""
        self._processes: dict[str, AgentProcess] = {}
        self._shells: dict[str, bytes] = {}
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
        """Whether a node's agent was heard of lately."""
        return node in self.seats and self.seats[node].there

    def begin(self, node: str, order: Callable[[str], m.Message]) -> AgentProcess:
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
                f"was not heard of for {SILENT_SECONDS:g} s"
            )
        try:
            process.begun.result(ANSWER_SECONDS)
        except TimeoutError as error:
            # Should it begin after all, nobody wants it.
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
        """Tell a node's agent; False if it is not there."""
        if not self.there(node) or not self._thread.is_alive():
            return False
        self._soon(self.seats[node].identity, message)
        return True

    def close(self, code: int) -> None:
        """All agents end with this exit code; harmless when it was said already."""
        if not self._thread.is_alive():
            return
        for seat in list(self.seats.values()):
            self._soon(seat.identity, m.Bye(code))
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(ANSWER_SECONDS)

    def _soon(self, identity: bytes, message: m.Message) -> None:
        frames = [identity, m.encode(message)]
        self._loop.call_soon_threadsafe(lambda: self._outgoing.put_nowait(frames))

    async def _serve(self, address: str) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._outgoing: asyncio.Queue[list[bytes]] = asyncio.Queue()
        context = zmq.asyncio.Context()
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 1000
        socket.maxmsgsize = MOST_BYTES
        try:
            meeting = Meeting(self._bind(socket, address), self._secret)
            authenticator.configure_curve_callback("*", credentials_provider=meeting.keys)
            self._bound.set_result(meeting)
            await self._until_over(socket)
        except zmq.ZMQError as error:
            reason = f"cannot listen for agents on {address}: {error}; give --address"
            self._bound.set_exception(ConfigError(reason))
        finally:
            authenticator.stop()
            socket.close()
            context.term()

    def _bind(self, socket: zmq.asyncio.Socket, address: str) -> str:
        Meeting("", self._secret).keys.protect_server(socket)
        port = socket.bind_to_random_port(f"tcp://{address}")
        return f"tcp://{address}:{port}"

    async def _until_over(self, socket: zmq.asyncio.Socket) -> None:
        loops = [self._listen(socket), self._talk(socket), self._look()]
        tasks = [asyncio.ensure_future(work) for work in loops]
        over = asyncio.ensure_future(self._over.wait())
        done, _ = await asyncio.wait([*tasks, over], return_when=asyncio.FIRST_COMPLETED)
        while not self._outgoing.empty():
            await socket.send_multipart(self._outgoing.get_nowait())
        for task in [*tasks, over]:
            task.cancel()
        for process in list(self._processes.values()):
            process.end(UNKNOWN_EXIT)
        for task in done:
            task.result()

    async def _talk(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send_multipart(await self._outgoing.get())

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            with suppress(ControlPlaneError):
                if len(frames) == 2:
                    self._hear(frames[0], m.decode(frames[1]))

    async def _look(self) -> None:
        """Nothing signals that a node is silent."""
        while True:
            for node, seat in self.seats.items():
                if not seat.there:
                    self._end_all_of(node)
            await asyncio.sleep(_LOOK_SECONDS)

    def _hear(self, identity: bytes, message: Any) -> None:
        if isinstance(message, m.Hello):
            self._greet(identity, message)
        elif isinstance(message, m.Shell):
            self._run_shell(identity, message)
        elif isinstance(message, m.Goodbye):
            for node, seat in list(self.seats.items()):
                if seat.identity == identity:
                    self.seats[node] = replace(seat, heard=float("-inf"))
                    self._end_all_of(node)
        elif isinstance(message, m.Running | m.NotRunning | m.Ended):
            self._note(message)

    def _greet(self, identity: bytes, hello: m.Hello) -> None:
        seat = self.seats.get(hello.node)
        if seat is not None and seat.token != hello.token and seat.there:
            reason = (
                f"two nodes are called {hello.node}: start `megatron-ft run` once on each node "
                "(mpirun -npernode 1, torchrun --nproc-per-node 1), or, to try several nodes on "
                "one machine, give each its own --node-name"
            )
            self._soon(identity, m.Refused("ConfigError", reason))
            with self._news:
                self.problem = self.problem or reason
                self._news.notify_all()
            return
        if seat is not None and seat.token != hello.token:
            self._end_all_of(hello.node)
        self._soon(identity, m.Heard())
        with self._news:
            now = time.monotonic()
            self.seats[hello.node] = AgentSeat(
                hello.rank, hello.address, hello.token, identity, now
            )
            self._news.notify_all()
        for process in self._of(hello.node):
            # What it said of this one was lost on the way.
            if process.begun.done() and process.id not in hello.running:
                process.end(UNKNOWN_EXIT)

    def _note(self, message: m.Running | m.NotRunning | m.Ended) -> None:
        process = self._processes.get(message.id)
        if process is None:
            return
        if isinstance(message, m.Running):
            with suppress(InvalidStateError):
                process.begun.set_result(message)
            return
        self._processes.pop(message.id)
        if isinstance(message, m.Ended):
            process.end(message.status)
            if shell := self._shells.pop(message.id, None):
                self._soon(shell, message)
            return
        error = error_class(message.error) if message.error else ProcessGoneError
        with suppress(InvalidStateError):
            process.begun.set_exception(error(message.reason))
        process.end(UNKNOWN_EXIT)
        if shell := self._shells.pop(message.id, None):
            self._soon(shell, m.Ended(message.id, 1))

    def _run_shell(self, identity: bytes, order: m.Shell) -> None:
        process = AgentProcess(order.node, self.send)
        process.id = order.id
        self._processes[order.id], self._shells[order.id] = process, identity
        argv = ("/bin/sh", "-c", IN_FOLDER, order.folder, order.words)
        start = m.Start(order.id, argv, order.env, order.log)
        if not self.send(order.node, start):
            self._note(m.Ended(order.id, 1))

    def _end_all_of(self, node: str) -> None:
        for process in self._of(node):
            process.end(UNKNOWN_EXIT)
            self._processes.pop(process.id, None)

    def _of(self, node: str) -> list[AgentProcess]:
        return [process for process in list(self._processes.values()) if process.node == node]
