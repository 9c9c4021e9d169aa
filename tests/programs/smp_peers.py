"""A process beside an SMP: ``python smp_peers.py NAME ARGS...`` calls the function of that name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_ft.arena.arena import Arena
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.identity import SnapshotId
from megatron_ft.erasure.worker import connect
from megatron_ft.rpc import client as module
from megatron_ft.rpc.messages import EncoderHello

environment = ProcessEnvironment.from_env()


def trainer() -> None:
    """Tells what it is offered, and stays."""
    client = module.TrainerClient(environment, 0)
    try:
        print("offer", client.hello("dp0", ()), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    sys.stdin.read()


def restored() -> None:
    """Says that it has restored, and dies."""
    module.NOTED_TIMEOUT_SECONDS = 600.0
    client = module.TrainerClient(environment, 0)
    client.shard_id = "dp0"
    client.restored(SnapshotId(1, 1))
    os.kill(os.getpid(), signal.SIGKILL)


def encoder(path: str, world: str, value: str, *held: str) -> None:
    """Fills the parity of a slot with a value on request."""
    with connect(environment, lambda: None) as smp:
        if held:
            print("held", flush=True)
            sys.stdin.readline()
        smp.send(EncoderHello(os.getpid(), world, environment.incarnation))
        print(smp.receive(60), flush=True)
        parity = Arena.open(Path(path)).parity(0, writable=True)
        sys.stdin.readline()
        parity[:] = int(value)
        print("wrote", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    {one.__name__: one for one in (trainer, restored, encoder)}[sys.argv[1]](*sys.argv[2:])
