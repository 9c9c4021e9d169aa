"""The agent of one node: starts, watches and ends processes as the supervisor asks.

``python -m megatron_ft.launchers.agents.agent`` takes AgentOrders as a line on its standard
input.  The agent leaves the process tree and the session of the process that started it: some
launchers end all descendants of what they started, and the node's SMP is a child of the agent.  It
ends when its input does.  Its starter waits for it and has its exit code: sshd ends the input
with the starter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from megatron_ft.core import private_files, procfs
from megatron_ft.core.environment import JOB, NODE, NODE_DIR
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.process_tools import received
from megatron_ft.launchers.agents.rendezvous import (
    HELLO_SECONDS,
    SILENT_SECONDS,
    AgentOrders,
    Meeting,
    address_towards,
    read_meeting,
)
from megatron_ft.launchers.launcher import ProcessGoneError
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.world import WORLD
from megatron_ft.rpc import messages as m

FAILURE_SECONDS = 2.0
MODULE = "megatron_ft.launchers.agents.agent"

log = logging.getLogger(__name__)


class AgentFront:
    """One agent, for as long as this object or its process is there."""

    def __init__(self, orders: AgentOrders, through: Sequence[str] = ()) -> None:
        """Start it, through the words of a remote shell and a host where it is not here.

        OSError when there is no such program.
        """
        self.node = orders.node
        self._process = subprocess.Popen(
            [*through, sys.executable, "-m", MODULE], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        # The status shows one that has ended already.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
            self._process.stdin.flush()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, that of the agent, once it has ended; None if it has not in time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def leave(self) -> None:
        """End the agent by closing its input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


class Agent:
    """Runs until a supervisor ends the job, or the process that started the agent has ended.

    Processes have sessions of their own and outlive it.
    """

    def __init__(self, orders: AgentOrders) -> None:
        self._orders, self._token = orders, uuid.uuid4().hex
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._started: dict[int, LocalProcess] = {}
        """Children of this process by process number; only their exit status is known."""
        self._watched: dict[str, LocalProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = False

    async def run(self) -> int:
        """Serve supervisors until the end; the exit code for the process that started this one."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._leave_at_end_of_input)
        while not self._left:
            meeting = self._meeting()
            if meeting is None:
                # A network file system does not announce a new file.
                await asyncio.sleep(HELLO_SECONDS / 4)
                continue
            code = await self._obey(meeting)
            if code is not None:
                return code
            if not self._left:
                log.warning("the supervisor at %s does not answer", meeting.endpoint)
        return 1

    def _leave_at_end_of_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._left = True
            self._send(m.AgentGoodbye())

    def _meeting(self) -> Meeting | None:
        return self._orders.meeting or read_meeting(Path(self._orders.file))

    async def _obey(self, meeting: Meeting) -> int | None:
        """Carry out orders of one supervisor; None when it is lost or another one leads."""
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.linger = 500
        meeting.keys.connect(socket, meeting.endpoint)
        address, heard, next_hello = address_towards(meeting.host), time.monotonic(), 0.0
        try:
            while not self._left and time.monotonic() < heard + SILENT_SECONDS:
                if time.monotonic() >= next_hello:
                    # A supervisor whose file is gone may still send its last message.
                    if (self._meeting() or meeting) != meeting:
                        return None
                    orders, running = self._orders, tuple(self._watched)
                    self._send(
                        m.AgentHello(orders.node, self._token, orders.rank, address, running)
                    )
                    next_hello = time.monotonic() + HELLO_SECONDS
                if await socket.poll(HELLO_SECONDS * 250):
                    message = m.decode(await socket.recv())
                    heard = time.monotonic()
                    if isinstance(message, m.SupervisorBye):
                        if message.code:
                            # The supervisor first: some launchers end all at the first exit.
                            await asyncio.sleep(FAILURE_SECONDS)
                        return message.code
                    if isinstance(message, m.Refused):
                        log.error("%s", message.reason)
                        return 2
                    self._carry_out(message)
            return None
        finally:
            self._socket = None
            socket.close()

    def _send(self, message: m.Message) -> None:
        if self._socket is not None:
            self._socket.send(m.encode(message))

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _carry_out(self, message: Any) -> None:
        if isinstance(message, m.StartProcess | m.AttachProcess):
            self._begin(message)
        elif isinstance(message, m.KillProcess) and message.id in self._watched:
            self._watched[message.id].kill()
        elif isinstance(message, m.EndWorld):
            self._later(self._end_world(message))

    def _begin(self, order: m.StartProcess | m.AttachProcess) -> None:
        try:
            process = (
                self._start(order) if isinstance(order, m.StartProcess) else self._attach(order)
            )
        except MegatronFTError as error:
            self._send(m.ProcessRefused(order.id, error, isinstance(error, ProcessGoneError)))
            return
        self._watched[order.id] = process
        self._send(m.ProcessRuns(order.id, process.pid, process.start_time))
        self._later(self._watch(order.id, process))

    def _start(self, order: m.StartProcess) -> LocalProcess:
        argv = [received(word) for word in order.argv]
        env = {received(name): received(value) for name, value in order.env.items()}
        if NODE_DIR in env:
            private_files.make_node_folder(Path(env[NODE_DIR]))
        log = Path(received(order.log))
        process = LocalProcess.spawn(self._orders.node, argv, env, log, order.stdin)
        self._started = {p: known for p, known in self._started.items() if known.alive()}
        self._started[process.pid] = process
        return process

    def _attach(self, order: m.AttachProcess) -> LocalProcess:
        known = self._started.get(order.pid)
        if known is not None and known.alive() and order.start_time in (None, known.start_time):
            return known
        process = LocalProcess.attach(self._orders.node, order.pid, order.start_time)
        env = procfs.read_environment(order.pid)
        if env.get(JOB) != order.job or env.get(NODE) != self._orders.node:
            raise ProcessGoneError(f"process {order.pid} is not one of job {order.job}")
        return process

    async def _watch(self, name: str, process: LocalProcess) -> None:
        status = await process.wait()
        self._watched.pop(name, None)
        self._send(m.ProcessEnded(name, status))

    async def _end_world(self, order: m.EndWorld) -> None:
        def belongs(pid: int) -> bool:
            env = procfs.read_environment(pid)
            # mpirun is the supervisor's own to end; it may be on this machine.
            return (env.get(JOB), env.get(WORLD)) == (order.job, order.world)

        await asyncio.to_thread(procfs.kill_matching, belongs, f"MPI world {order.world}")
        self._send(m.ProcessEnded(order.id, 0))


def main() -> int:
    """Read the orders, have the agent obey them elsewhere, wait for its end."""
    orders = msgspec.json.decode(_first_line(), type=AgentOrders)
    _enter(orders)
    # A signal that a launcher sends to all of a job must not end the memory before it was drained.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end, agents_end = os.pipe()
    middle = os.fork()
    if middle:
        os.close(agents_end)
        os.waitpid(middle, 0)
        return int(os.read(end, 16) or b"1")
    os.close(end)
    os.setsid()
    if not os.fork():
        os.write(agents_end, str(_obey(orders)).encode())
    os._exit(0)


def _enter(orders: AgentOrders) -> None:
    """Go to the folder of the command line: a remote shell begins in the user's home folder."""
    if not orders.folder:
        return
    try:
        os.chdir(orders.folder)
    except OSError as error:
        print(
            f"megatron-ft, agent of {orders.node}: warning: the folder {orders.folder}, where "
            f"`megatron-ft run` was started, cannot be entered here ({error.strerror}): programs "
            f"start in {os.getcwd()}, and relative paths count from there",
            file=sys.stderr,
        )


def _first_line() -> bytes:
    """Read the first line without sys.stdin, which would buffer what follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("megatron-ft: an agent got no orders on its standard input")
        line += byte
    return line


def _obey(orders: AgentOrders) -> int:
    logging.basicConfig(format=f"megatron-ft, agent of {orders.node}: %(message)s")
    try:
        return asyncio.run(Agent(orders).run())
    except (MegatronFTError, OSError) as error:
        logging.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
