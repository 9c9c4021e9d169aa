"""The SMP's Unix socket: trainers, encoders, readers and the command line, same machine."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from typing import Any

import zmq.asyncio

from megatron_ft.arena import upkeep
from megatron_ft.core.errors import ControlPlaneError, MegatronFTError, StaleIncarnationError
from megatron_ft.core.pid_namespace import pid_namespace
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Peer, Server, listen_local, refusal
from megatron_ft.smp.host import NodeHost, resident_bytes
from megatron_ft.smp.writers import DRAIN, start_time_of

log = logging.getLogger(__name__)

TOLD_TIMEOUT_SECONDS = 50.0
"""For the coordinator to say what an incarnation restores; trainers wait longer for an answer."""

FROM_WRITERS = (
    m.Begins
    | m.Sealed
    | m.Missed
    | m.Abandoned
    | m.Encoded
    | m.Rebuilt
    | m.Recomputed
    | m.OrderDone
    | m.OrderFailed
)
PASSED_ON = m.Restored | m.Declined | m.CorruptShard | m.Unfit | m.CaptureCost


class LocalServer:
    """Serves one NodeHost to the processes of its machine."""

    def __init__(self, host: NodeHost, context: zmq.asyncio.Context) -> None:
        self._host = host
        self._server = Server(context)
        self.socket = self._server.socket
        listen_local(self.socket, host.environment.socket)
        self._inode = host.environment.socket.lstat().st_ino
        host.send_local = self.send

    async def send(self, identity: bytes, body: m.Message) -> None:
        """Send one message to one peer; one that has left gets nothing."""
        await self._server.send((identity,), body)

    def in_place(self) -> bool:
        """Whether those who open the socket's path reach this server."""
        try:
            return self._host.environment.socket.lstat().st_ino == self._inode
        except OSError:
            return False

    def bind_again(self) -> None:
        """Make the socket's file again; connections that are open stay."""
        path = self._host.environment.socket
        self.socket.unbind(f"ipc://{path}")
        upkeep.clear(path)
        listen_local(self.socket, path)
        self._inode = path.lstat().st_ino

    async def serve(self) -> None:
        """Answer until cancelled."""
        await self._server.serve(self._handle)

    async def _handle(self, peer: Peer, message: Any) -> m.Message | None:
        identity = peer[0]
        if isinstance(message, m.Hello):
            return await self._hello(identity, message)
        if isinstance(message, m.EncoderHello):
            try:
                return await self._encoder_hello(identity, message)
            except (MegatronFTError, OSError) as error:
                await self._host.tell(m.EncoderRefused(message.world, str(error)))
                raise
        if isinstance(message, m.Prepare):
            if self._host.writers.find("trainer", message.shard_id) is None:
                reason = f"no trainer of {message.shard_id} has said hello here"
                return m.Refused("ControlPlaneError", reason)
            self._host.preparing[message.shard_id] = identity
            await self._host.tell(message)
            return None
        if isinstance(message, PASSED_ON):
            await self._host.tell(message)
            return m.Noted() if isinstance(message, m.Restored) else None
        if isinstance(message, m.Loaded):
            self._host.store.check_record(message.record)
            answer = self._host.machine.handle(message)
            await self._host.carry_out()
            return answer
        if isinstance(message, FROM_WRITERS):
            await self._from_writer(message)
            return None
        return await self._from_command_line(message)

    async def _from_command_line(self, message: Any) -> m.Message:
        if isinstance(message, m.StatusRequest):
            return self._status()
        if isinstance(message, m.Pause):
            self._host.set_state(self._host.state.paused_as(message.paused))
            return m.Ok()
        if isinstance(message, m.Rewind):
            return self._rewind(message)
        if isinstance(message, m.Discard):
            return await self._discard()
        if isinstance(message, m.Pin):
            return self._pin(message)
        if isinstance(message, m.Errand):
            return self._errand(message)
        if isinstance(message, m.Unpin):
            self._host.readers.forget(message.reader)
            return self._host.machine.handle(message)
        reason = f"{type(message).__name__} does not belong on the Unix socket"
        return m.Refused("ControlPlaneError", reason)

    def _pin(self, message: m.Pin) -> m.Message:
        """Watch the reader first: a pin of one that is dead already would last for ever."""
        self._host.readers.watch(message.reader, message.pid)
        answer = self._host.machine.handle(message)
        if isinstance(answer, m.Refused):
            self._host.readers.forget(message.reader)
        return answer

    def _errand(self, message: m.Errand) -> m.Message:
        host = self._host
        current = host.machine.highest_incarnation
        if not message.incarnation == current == host.state.highest_incarnation:
            return m.Refused(
                "StaleIncarnationError",
                f"it is of incarnation {message.incarnation}, the node is at {current}",
            )
        if host.lease_until and time.monotonic() >= host.lease_until:
            return m.Refused("ControlPlaneError", "no supervisor leads this job just now")
        host.enter(host.writers.add(DRAIN, message.who, message.pid, b""))
        return m.Ok()

    def _rewind(self, message: m.Rewind) -> m.Message:
        if time.monotonic() >= self._host.lease_until:
            return m.Refused("ControlPlaneError", "no supervisor leads this job just now")
        self._host.rewind = message.before
        return m.Ok()

    async def _discard(self) -> m.Message:
        left = self._host.lease_until - time.monotonic()
        if left > 0:
            reason = (
                "a supervisor leads this job, or did until just now: end it, and wait "
                f"{math.ceil(left)} s until its lease has run out"
            )
            return m.Refused("ControlPlaneError", reason)
        await self._host.retire(remove_arenas=True)
        return m.Ok()

    async def _from_writer(self, message: m.Message) -> None:
        if isinstance(message, m.Sealed | m.Rebuilt):
            self._host.store.check_record(message.record)
        answer = self._host.machine.handle(message)
        if isinstance(answer, m.Refused):
            log.warning("%s refused: %s", type(message).__name__, answer.reason)
        await self._host.carry_out()

    async def _hello(self, identity: bytes, message: m.Hello) -> m.Message | None:
        self._check_incarnation("trainer", message.incarnation)
        _check_namespace(message)
        await self._admit_writer("trainer", message.shard_id, message.pid, identity)
        await self._host.tell(message)
        if self._host.restore is None:
            self._host.later(self._welcome_once_told(identity, message))
            return None
        return self._welcome(message.shard_id, self._host.restore)

    async def _welcome_once_told(self, identity: bytes, message: m.Hello) -> None:
        """An SMP that was restarted has not been told what is restored, which is not "nothing"."""
        try:
            await asyncio.wait_for(self._host.told.wait(), TOLD_TIMEOUT_SECONDS)
            self._check_incarnation("trainer", message.incarnation)
            assert self._host.restore is not None, "told of this incarnation"
            answer = self._welcome(message.shard_id, self._host.restore)
        except asyncio.TimeoutError:
            answer = m.Refused(
                "ControlPlaneError",
                f"the coordinator has not told node {self._host.machine.node} in "
                f"{TOLD_TIMEOUT_SECONDS:.0f} s what incarnation {message.incarnation} restores: "
                "its SMP was restarted, and this start must end",
            )
        except MegatronFTError as error:
            answer = refusal(error)
        await self.send(identity, answer)

    def _check_incarnation(self, role: str, incarnation: int) -> None:
        """Turn away who belongs to another incarnation than the one admitted or being admitted."""
        current = self._host.state.highest_incarnation
        if incarnation != current:
            raise StaleIncarnationError(
                f"{role} of incarnation {incarnation} on node {self._host.machine.node}, which "
                f"is at {current}: it was started for an earlier incarnation"
            )

    def _welcome(self, shard_id: str, ready: m.RestoreReady) -> m.Message:
        machine = self._host.machine
        if ready.snapshot is None:
            return m.Welcome()
        slots = machine.shards.get(shard_id)
        slot = None if slots is None else slots.find(ready.snapshot)
        if slots is None or slot is None:
            # An empty welcome would start this rank from nothing beside restored ones.
            return m.Refused(
                "LayoutMismatchError",
                f"the job restores snapshot {ready.snapshot}, in which node {machine.node} has no "
                f"shard {shard_id} (it has {', '.join(machine.shards) or 'none'}): start with the "
                "parallel shape of the snapshot, or remove it with `megatron-ft clean`",
            )
        return m.Welcome(
            arena=machine.paths[shard_id],
            slot=slot,
            restore=slots.slots[slot].record,
            source=ready.sources.get(shard_id, "memory"),
        )

    async def _encoder_hello(self, identity: bytes, message: m.EncoderHello) -> m.Message:
        self._check_incarnation("encoder", message.incarnation)
        self._check_world(message)
        await self._admit_writer("encoder", message.world, message.pid, identity)
        await self._host.tell(message)
        return m.EncoderWelcome(str(self._host.job), self._host.machine.node)

    def _check_world(self, message: m.EncoderHello) -> None:
        """Turn away who was started before the world that is here, and comes late."""
        try:
            started = start_time_of(message.pid)
        except ProcessLookupError as error:
            raise ControlPlaneError(f"process {message.pid} is gone") from error
        for writer in self._host.writers.all():
            if writer.role == "encoder" and started < writer.start_time:
                raise StaleIncarnationError(
                    f"encoder of world {message.world} on node {self._host.machine.node}, where "
                    f"world {writer.who} is: it was started for an earlier one"
                )

    async def _admit_writer(self, role: str, who: str, pid: int, identity: bytes) -> None:
        """Register a writer after every other one that could touch the same slots is dead."""
        writers, admitted = self._host.writers, self._host.state.highest_incarnation
        rivals = [
            w
            for w in writers.all()
            if w.role == role and (role == "encoder" or w.who == who) and w.pid != pid
        ]
        if any(w.pid == pid and w.role == role and w.who != who for w in writers.all()):
            raise ControlPlaneError(f"process {pid} is a {role} here already, under another name")
        await self._host.kill_writers(rivals)
        if (
            self._host.state.highest_incarnation != admitted
            or self._host.machine.highest_incarnation != admitted
        ):
            raise StaleIncarnationError(f"{role} {who} came while a new incarnation is admitted")
        if writers.find(role, who) is None:
            self._host.enter(writers.add(role, who, pid, identity))

    def _status(self) -> m.Status:
        host = self._host
        return m.Status(
            node=host.machine.node,
            pid=os.getpid(),
            incarnation=host.machine.highest_incarnation,
            paused=host.state.paused,
            lease_seconds_left=max(0.0, host.lease_until - time.monotonic()),
            resident_bytes=resident_bytes(),
            arenas=host.store.reports(host.machine),
            progress=host.store.progress(),
            summary=m.merged_summary(host.summary),
            scrub=host.scrub_counts,
        )


def _check_namespace(message: m.Hello) -> None:
    """Its number would be another process's here, which the next fence would kill."""
    if message.pid_namespace not in (0, pid_namespace()):
        raise ControlPlaneError(
            f"the trainer of {message.shard_id} has process numbers of its own (a PID namespace), "
            "by which its SMP cannot watch it: start its container with the host's "
            "(docker, podman: `--pid host`)"
        )
