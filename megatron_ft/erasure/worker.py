"""The encoder process: ``python -m megatron_ft.erasure.worker --world ID``, a rank of a world.

One encoder per node, in a disposable world over MPI or TCP.  It takes orders from its own
node's SMP over the Unix socket; the transport only moves bytes, and idles without a call.  Any
failure, of the transport or of ours, ends the whole world: members in other processes may be
waiting for us, and starting a new world costs less than repairing one.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any
from uuid import UUID

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_ft.core.background import bind_to_background_cpus, lower_priority
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.erasure.checks import CorruptMemberError
from megatron_ft.erasure.orders import Order, OrderRunner
from megatron_ft.erasure.transport import Transport
from megatron_ft.erasure.world import join_world
from megatron_ft.rpc.messages import (
    EncodeOrder,
    EncoderHello,
    EncoderWelcome,
    Message,
    Ok,
    OrderFailed,
    RebuildOrder,
    RepairOrder,
    VerifyOrder,
    decode,
    encode,
)
from megatron_ft.rpc.sockets import connect_local

WELCOME_SECONDS = 60.0
FLUSH_SECONDS = 5.0

ENCODE_RATE = "MEGATRON_FT_ENCODE_RATE"
"""The environment variable that tells an encoder its cap, in bytes a second."""

EXIT_FAILED = 1
EXIT_SMP_GONE = 3
"""Exit status when the SMP has closed the connection."""


class SmpConnection:
    """The encoder's end of the SMP's Unix socket; ``on_lost`` is called when the SMP goes away.

    ``on_lost`` comes from a thread of its own, so that it is called even while the transport
    blocks.
    """

    def __init__(self, environment: ProcessEnvironment, on_lost: Callable[[], None]) -> None:
        """Connect; that the SMP is there is known only after ``receive``."""
        self._environment = environment
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        monitor = self._socket.get_monitor_socket(
            zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
        )
        self._watcher = threading.Thread(
            target=_watch, args=(monitor, on_lost), name="smp-watcher", daemon=True
        )
        self._watcher.start()
        connect_local(self._socket, environment.socket)

    def send(self, message: Message) -> None:
        """Hand a message to the socket's own thread."""
        self._socket.send(encode(message))

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The next message; None means to wait for as long as it takes.

        ControlPlaneError, which names the SMP, after the timeout.
        """
        timeout = None if timeout_seconds is None else int(timeout_seconds * 1000)
        if not self._socket.poll(timeout, zmq.POLLIN):
            raise ControlPlaneError(
                f"the SMP of node {self._environment.node} did not answer in {timeout_seconds:g} s "
                f"on {self._environment.socket}; is it running?"
            )
        return decode(self._socket.recv())

    def __enter__(self) -> SmpConnection:
        """Nothing more to do."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Give messages that were sent a few seconds to leave, then close."""
        self._socket.disable_monitor()
        self._watcher.join(FLUSH_SECONDS)
        self._socket.close(linger=int(FLUSH_SECONDS * 1000))
        self._context.term()


def serve(
    environment: ProcessEnvironment, world: str, open_transport: Callable[[], Transport]
) -> None:
    """Introduce this rank to its SMP and carry out orders; returns only by an exception.

    An order that fails is reported before the exception goes on.
    """
    with SmpConnection(environment, _leave) as smp:
        transport = open_transport()
        place = (transport.rank, transport.size)
        smp.send(EncoderHello(os.getpid(), world, *place, environment.incarnation))
        welcome = smp.receive(WELCOME_SECONDS)
        if not isinstance(welcome, EncoderWelcome):
            raise ControlPlaneError(f"the SMP of {environment.node} refused us: {welcome}")
        runner = OrderRunner(UUID(welcome.job), open_transport, _encode_rate())
        while True:
            message = smp.receive()
            if isinstance(message, Ok):
                continue
            if not isinstance(message, EncodeOrder | RebuildOrder | VerifyOrder | RepairOrder):
                raise ControlPlaneError(f"the SMP sent what is no order: {message}")
            _carry_out(runner, message, smp)


def _carry_out(runner: OrderRunner, order: Order, smp: SmpConnection) -> None:
    try:
        for report in runner.run(order):
            smp.send(report)
    except BaseException as error:
        corrupt = error.shard_id if isinstance(error, CorruptMemberError) else ""
        reason = f"{type(error).__name__}: {error}"
        smp.send(OrderFailed(order.snapshot, order.world, reason, corrupt))
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until something breaks; then every rank of the world ends."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.erasure.worker")
    parser.add_argument("--world", required=True, help="name of this encoder world")
    options = parser.parse_args(arguments)
    environment = ProcessEnvironment.from_env()
    bind_to_background_cpus()
    lower_priority()
    world = join_world()
    try:
        serve(environment, options.world, world.transport)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        world.abort(EXIT_FAILED)
    return EXIT_FAILED


def _encode_rate() -> float:
    """Bytes a second that the launcher allows while parity is made, 0 for no cap."""
    return float(os.environ.get(ENCODE_RATE, "0"))


def _watch(monitor: zmq.Socket[bytes], on_lost: Callable[[], None]) -> None:
    while True:
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.Event.DISCONNECTED:
            on_lost()
        if event == zmq.Event.MONITOR_STOPPED:
            monitor.close(linger=0)
            return


def _leave() -> None:
    """Without an SMP nobody watches us; the launcher ends the other ranks when one leaves."""
    print("the SMP closed the connection: this encoder leaves", file=sys.stderr, flush=True)
    os._exit(EXIT_SMP_GONE)


if __name__ == "__main__":
    sys.exit(main())
