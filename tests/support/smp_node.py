"""A real SMP process in a folder of its own, and a coordinator's link to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import seal
from megatron_ft.arena.format import Permit
from megatron_ft.core.environment import READY_NAME, ProcessEnvironment
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys, Peer
from megatron_ft.smp.__main__ import Credentials, Ready
from megatron_ft.smp.service import SmpService
from megatron_ft.supervisor.smp_link import SmpLink

SECRET = bytes(range(32))
T = TypeVar("T")


class SmpNode:
    """Starts, kills and restarts one SMP; ``events`` collects what it tells the coordinator."""

    def __init__(self, folder: Path, name: str = "node0", job: str = "job") -> None:
        self.job = uuid.UUID(int=7)
        self.environment = ProcessEnvironment(job, name, folder / name, 1)
        self.log = folder / f"{name}.log"
        self.events: asyncio.Queue[m.NodeEvent] = asyncio.Queue()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, status_file: str = "") -> None:
        credentials = msgspec.json.encode(Credentials(str(self.job), SECRET, status_file))
        ready = self.environment.node_dir / READY_NAME
        ready.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_ft.smp"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment.variables()},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(credentials)
        self.process.stdin.close()

    async def endpoint(self) -> str:
        path = self.environment.node_dir / READY_NAME
        for _ in range(600):
            if path.exists():
                return msgspec.json.decode(path.read_bytes(), type=Ready).endpoint
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            await asyncio.sleep(0.05)
        raise AssertionError(f"the SMP did not come up: {self.log.read_text()}")

    async def link(self, context: zmq.asyncio.Context, secret: bytes = SECRET) -> SmpLink:
        keys = JobKeys.derive(secret)
        endpoint = await self.endpoint()
        return SmpLink(context, self.environment.node, endpoint, keys, self.events.put_nowait)

    async def event(self, kind: type[T]) -> T:
        """The next event with this body; others are passed over."""
        while True:
            event = await asyncio.wait_for(self.events.get(), 30)
            if isinstance(event.body, kind):
                return event.body

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def create(
    shard_id: str = "dp0", incarnation: int = 1, slots: int = 2, data_bytes: int = 131072
) -> m.CreateArena:
    return m.CreateArena(
        incarnation=incarnation,
        shard_id=shard_id,
        lineage=(Ancestor(incarnation, None),),
        codec="none",
        data_members=1,
        parity_members=0,
        member_index=0,
        members=(shard_id,),
        data_bytes=data_bytes,
        block_bytes=65536,
        slot_count=slots,
    )


def snapshot(sequence: int, incarnation: int = 1) -> SnapshotId:
    return SnapshotId(incarnation, sequence)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


def begin(node: SmpNode, arena: Arena) -> Permit:
    """Have the permitted slot given, as a trainer does before it writes."""
    permit = arena.permit()
    assert permit is not None
    shard = arena.header.shard_id
    say(node, m.Begins(shard, permit.snapshot, permit.iteration, permit.slot))
    until = time.monotonic() + 30
    while arena.slot(permit.slot).snapshot != permit.snapshot:
        assert time.monotonic() < until, f"no slot for {permit}: {node.log.read_text()}"
        time.sleep(0.002)
    return permit


def capture(node: SmpNode, shard_id: str = "dp0") -> m.Sealed:
    """What a trainer does with a granted slot."""
    with Arena.open(node.environment.node_dir / f"{shard_id}.arena") as arena:
        permit = begin(node, arena)
        data = arena.data(permit.slot, writable=True)
        data[:1000] = np.full(1000, permit.snapshot.sequence, np.uint8)
        record = seal(
            data,
            shard_id=shard_id,
            snapshot=permit.snapshot,
            iteration=permit.iteration,
            tensor_bytes=1000,
            meta=b"meta",
            layout_hash=bytes(32),
            block_bytes=65536,
        )
        del data
    return m.Sealed(record)


def say(node: SmpNode, message: m.Message) -> None:
    """Send one frame to the Unix socket without waiting for an answer."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 5000
    socket.connect(f"ipc://{node.environment.socket}")
    socket.send(m.encode(message))
    socket.close()
    context.term()


def service(environment: ProcessEnvironment) -> SmpService:
    """An SMP without sockets in this process: what it sends is lost."""
    return SmpService(environment, uuid.UUID(int=7), _nowhere, _nowhere)


async def _nowhere(peer: Peer, message: m.Message) -> None:
    pass
