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
import traceback
from collections.abc import Callable, Sequence
from uuid import UUID

from megatron_ft.core.background import lower_priority
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError, LayoutMismatchError, explain
from megatron_ft.erasure.member import CorruptMemberError
from megatron_ft.erasure.orders import Order, OrderRunner
from megatron_ft.erasure.transport import Transport
from megatron_ft.erasure.world import join_world
from megatron_ft.rpc.messages import (
    EncoderHello,
    EncoderWelcome,
    Ok,
    OrderFailed,
)
from megatron_ft.rpc.sockets import Connection

WELCOME_SECONDS = 60.0
FLUSH_SECONDS = 5.0

ENCODE_RATE = "MEGATRON_FT_ENCODE_RATE"
"""The environment variable that tells an encoder its cap, in bytes a second."""

EXIT_FAILED = 1
EXIT_SMP_GONE = 3
"""Exit status when the SMP has closed the connection."""


def connect(environment: ProcessEnvironment, on_lost: Callable[[], None]) -> Connection:
    """Connect to the node's SMP; only an answer shows that it is there."""
    return Connection(environment.socket, linger_ms=int(FLUSH_SECONDS * 1000), on_lost=on_lost)


def serve(
    environment: ProcessEnvironment, world: str, open_transport: Callable[[], Transport]
) -> None:
    """Introduce this rank to its SMP and carry out orders; returns only by an exception.

    An order that fails is reported before the exception continues.
    """
    with connect(environment, _leave) as smp:
        smp.send(EncoderHello(os.getpid(), world, environment.incarnation))
        welcome = welcomed(environment, smp, WELCOME_SECONDS)
        runner = OrderRunner(UUID(welcome.job), open_transport, _encode_rate())
        while True:
            message = smp.receive()
            if isinstance(message, Ok):
                continue
            if not isinstance(message, Order):
                raise ControlPlaneError(f"the SMP sent what is no order: {message}")
            _carry_out(runner, message, smp)


def welcomed(environment: ProcessEnvironment, smp: Connection, seconds: float) -> EncoderWelcome:
    """The SMP's answer to EncoderHello; ControlPlaneError, which names the SMP, without one."""
    try:
        welcome = smp.receive(seconds)
    except TimeoutError:
        raise ControlPlaneError(
            f"the SMP of node {environment.node} did not answer in {seconds:g} s "
            f"on {environment.socket}; is it running?"
        ) from None
    if not isinstance(welcome, EncoderWelcome):
        raise ControlPlaneError(f"the SMP of {environment.node} refused us: {welcome}")
    return welcome


def _carry_out(runner: OrderRunner, order: Order, smp: Connection) -> None:
    try:
        for report in runner.run(order):
            smp.send(report)
    except BaseException as error:
        corrupt = error.shard_id if isinstance(error, CorruptMemberError) else ""
        unfit = isinstance(error, LayoutMismatchError)
        reason = str(error) if unfit else explain(error)
        smp.send(OrderFailed(order.snapshot, order.world, reason, corrupt, unfit))
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until something breaks; then every rank of the world ends."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.erasure.worker")
    parser.add_argument("--world", required=True, help="name of this encoder world")
    options = parser.parse_args(arguments)
    environment = ProcessEnvironment.from_env()
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


def _leave() -> None:
    """End this encoder: nobody watches it without an SMP; the launcher ends the other ranks."""
    print("the SMP closed the connection: this encoder leaves", file=sys.stderr, flush=True)
    os._exit(EXIT_SMP_GONE)


if __name__ == "__main__":
    sys.exit(main())
