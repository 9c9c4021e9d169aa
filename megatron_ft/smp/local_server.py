"""Requests to an SMP from its own machine: trainers, encoders, readers, command line."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from contextlib import suppress
from typing import Any

from megatron_ft.arena import files
from megatron_ft.core.errors import (
    ControlPlaneError,
    LayoutMismatchError,
    MegatronFTError,
    StaleIncarnationError,
)
from megatron_ft.core.procfs import pid_namespace
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Peer, Server, answered, listen_local
from megatron_ft.smp.processes import DRAIN, start_time_of
from megatron_ft.smp.service import SmpService, resident_bytes
from megatron_ft.smp.state_machine import REPORTS

log = logging.getLogger(__name__)

RESTORE_TIMEOUT_SECONDS = 50.0
"""Longest wait for the coordinator to say what is restored; trainers wait longer for an answer."""

PASSED_ON = (
    *(m.Restored, m.Declined, m.Ending, m.CorruptShard, m.Unfit),
    *(m.CaptureCost, m.Slowed, m.Outgrown, m.Attached, m.Unattached),
)
"""Messages of trainers that the coordinator alone decides upon."""


class LocalServer:
    """Serves one SmpService on the Unix socket next to its arenas."""

    def __init__(self, service: SmpService, server: Server, status_file: str = "") -> None:
        self._service, self._server, self._status_file = service, server, status_file
        self._path = service.environment.socket
        listen_local(server.socket, self._path)
        self._inode = self._path.lstat().st_ino

    def in_place(self) -> bool:
        """True if the socket's path leads to this server."""
        try:
            return self._path.lstat().st_ino == self._inode
        except OSError:
            return False

    def bind_again(self) -> None:
        """Make the socket's file again; connections that are open stay."""
        self._server.socket.unbind(f"ipc://{self._path}")
        files.clear(self._path)
        listen_local(self._server.socket, self._path)
        self._inode = self._path.lstat().st_ino

    async def serve(self) -> None:
        await self._server.serve(self._handle)

    async def _handle(self, peer: Peer, message: Any) -> m.Message | None:
        service, (identity,) = self._service, peer
        if type(message) in REPORTS:
            if isinstance(message, m.Sealed | m.Rebuilt | m.Reshaped):
                service.store.check_record(message.record)
            answer = service.machine.handle(message)
            if isinstance(answer, m.Refused):
                log.warning("%s refused: %s", type(message).__name__, answer.reason)
            await service.carry_out()
            return None
        if isinstance(message, PASSED_ON):
            await service.events.publish(message)
            return m.Noted() if isinstance(message, m.Restored | m.Ending) else None
        if isinstance(message, m.Restartable):
            service.survivors.enter(message, identity)
            await service.events.publish(message)
            return m.Ok()
        if isinstance(message, m.Released):
            service.survivors.released(message)
            return None
        if isinstance(message, m.Hello):
            await self._hello(identity, message)
            return None
        if isinstance(message, m.Prepare):
            await self._prepare(identity, message)
            return None
        if isinstance(message, m.EncoderHello):
            if message.incarnation <= service.machine.highest_incarnation:
                return await self._encoder_hello(identity, message)
            started = _start_time(message.pid)
            await service.events.publish(m.EncoderWaits(message.world))
            service.later(self._encoder_once_admitted(identity, message, started))
            return None
        if isinstance(message, m.Loaded):
            service.store.check_record(message.record)
            answer = service.machine.handle(message)
            await service.carry_out()
            return answer
        return await self._from_short_lived(message)

    # Trainers and encoders.

    async def _hello(self, identity: bytes, message: m.Hello) -> None:
        service = self._service
        self._check_incarnation("trainer", message.incarnation)
        if message.pid_namespace not in (0, pid_namespace()):
            # The next fence would kill a wrong process.
            raise ControlPlaneError(
                f"the trainer of {message.shard_id} has process numbers of its own (a PID "
                "namespace), by which its SMP cannot watch it: start its container with the "
                "host's (docker, podman: `--pid host`)"
            )
        await self._admit_writer("trainer", message.shard_id, message.pid, identity)
        await service.events.publish(message)
        service.later(self._welcome_once_known(identity, message))

    async def _welcome_once_known(self, identity: bytes, message: m.Hello) -> None:
        """Wait for what is restored: an SMP that was restarted does not know it yet."""
        answer = await answered(self._awaited_welcome(message), message)
        assert answer is not None
        await self._service.send_local((identity,), answer)

    async def _awaited_welcome(self, message: m.Hello) -> m.Message:
        service = self._service
        try:
            await asyncio.wait_for(service.restore_known.wait(), RESTORE_TIMEOUT_SECONDS)
        except asyncio.TimeoutError:
            raise ControlPlaneError(
                f"the SMP of node {service.machine.node} was restarted and has not learned in "
                f"{RESTORE_TIMEOUT_SECONDS:.0f} s what incarnation {message.incarnation} restores: "
                "this start ends, and the next one follows"
            ) from None
        self._check_incarnation("trainer", message.incarnation)
        assert service.restore is not None, "known for this incarnation"
        return self._welcome(message.shard_id, service.restore)

    def _check_incarnation(self, role: str, incarnation: int) -> None:
        """Turn away a process of another incarnation than the one admitted or being admitted."""
        current = self._service.state.highest_incarnation
        if incarnation != current:
            raise StaleIncarnationError(
                f"{role} of incarnation {incarnation} on node {self._service.machine.node}, which "
                f"is at {current}: it was started for an earlier incarnation"
            )

    def _welcome(self, shard_id: str, ready: m.RestoreReady) -> m.Message:
        machine = self._service.machine
        if ready.snapshot is None:
            return m.Welcome()
        if ready.reshaped:
            return m.Welcome(reshaped=ready.snapshot, iteration=ready.iteration)
        slots = machine.shards.get(shard_id)
        slot = None if slots is None else slots.find(ready.snapshot)
        if slots is None or slot is None:
            # An empty welcome would start this rank from nothing, and others from a snapshot.
            raise LayoutMismatchError(
                f"the job restores snapshot {ready.snapshot}, in which node {machine.node} has no "
                f"shard {shard_id} (it has {', '.join(machine.shards) or 'none'}): start with the "
                "parallel shape of the snapshot, or remove it with `megatron-ft clean`"
            )
        return m.Welcome(
            arena=machine.paths[shard_id],
            slot=slot,
            restore=slots.slots[slot].record,
            source=ready.origins.get(shard_id, "memory"),
        )

    async def _prepare(self, identity: bytes, message: m.Prepare) -> None:
        if self._service.writers.find("trainer", message.shard_id) is None:
            raise ControlPlaneError(f"no trainer of {message.shard_id} has said hello here")
        self._service.preparing[message.shard_id] = identity
        await self._service.events.publish(message)

    async def _encoder_once_admitted(
        self, identity: bytes, message: m.EncoderHello, started: int
    ) -> None:
        """Register an encoder that was started ahead; until then it has no order, and no arena."""
        service = self._service
        while service.machine.highest_incarnation < message.incarnation:
            await service.admitted.wait()
        with suppress(ControlPlaneError):
            if _start_time(message.pid) != started:
                return  # it has died, and its number is another process's
        answer = await answered(self._encoder_hello(identity, message), message)
        assert answer is not None
        await service.send_local((identity,), answer)

    async def _encoder_hello(self, identity: bytes, message: m.EncoderHello) -> m.Message:
        service = self._service
        node = service.machine.node
        try:
            self._check_incarnation("encoder", message.incarnation)
            started = _start_time(message.pid)
            for writer in service.writers.all():
                if writer.role == "encoder" and started < writer.start_time:
                    raise StaleIncarnationError(
                        f"encoder of world {message.world} on node {node}, where world "
                        f"{writer.who} is: it was started for an earlier one"
                    )
            await self._admit_writer("encoder", message.world, message.pid, identity)
            await service.events.publish(message)
            return m.EncoderWelcome(str(service.job), node)
        except (MegatronFTError, OSError) as error:
            await service.events.publish(m.EncoderRefused(message.world, str(error)))
            raise

    async def _admit_writer(self, role: str, who: str, pid: int, identity: bytes) -> None:
        """Register a writer after every other one that could touch the same slots is dead."""
        service = self._service
        writers, admitted = service.writers, service.state.highest_incarnation
        rivals = [
            w
            for w in writers.all()
            if w.role == role and (role == "encoder" or w.who == who) and w.pid != pid
        ]
        if any(w.pid == pid and w.role == role and w.who != who for w in writers.all()):
            raise ControlPlaneError(f"process {pid} is a {role} here already, under another name")
        await service.kill_writers(rivals)
        current = (service.state.highest_incarnation, service.machine.highest_incarnation)
        if current != (admitted, admitted):
            raise StaleIncarnationError(f"{role} {who} came while a new incarnation is admitted")
        if writers.find(role, who) is None:
            service.enter(writers.add(role, who, pid, identity))

    # Readers, drains and the command line.

    async def _from_short_lived(self, message: Any) -> m.Message:
        service = self._service
        if isinstance(message, m.StatusRequest):
            return self._status()
        if isinstance(message, m.Pause):
            service.change_state(paused=message.paused)
        elif isinstance(message, m.Rewind):
            self._check_led()
            service.rewind = message.before
        elif isinstance(message, m.Evacuate):
            self._check_led()
            service.evacuations[message.node] = message
        elif isinstance(message, m.Discard):
            await self._discard()
        elif isinstance(message, m.Pin):
            return self._pin(message)
        elif isinstance(message, m.Unpin):
            service.readers.forget(message.reader)
            return service.machine.handle(message)
        elif isinstance(message, m.LeasedProcess):
            self._register_drain(message)
        else:
            name = type(message).__name__
            raise ControlPlaneError(f"{name} does not belong on the Unix socket")
        return m.Ok()

    def _pin(self, message: m.Pin) -> m.Message:
        """Watch the reader first: a pin of one that is dead already would last for ever."""
        self._service.readers.watch(message.reader, message.pid)
        answer = self._service.machine.handle(message)
        if isinstance(answer, m.Refused):
            self._service.readers.forget(message.reader)
        return answer

    def _register_drain(self, message: m.LeasedProcess) -> None:
        service = self._service
        current = service.machine.highest_incarnation
        if not message.incarnation == current == service.state.highest_incarnation:
            raise StaleIncarnationError(
                f"it is of incarnation {message.incarnation}, the node is at {current}"
            )
        if service.lease_until:
            self._check_led()
        service.enter(service.writers.add(DRAIN, message.who, message.pid, b""))

    def _check_led(self) -> None:
        if time.monotonic() >= self._service.lease_until:
            raise ControlPlaneError("no supervisor leads this job just now")

    async def _discard(self) -> None:
        left = self._service.lease_until - time.monotonic()
        if left > 0:
            raise ControlPlaneError(
                "a supervisor leads this job, or did until just now: end it, and wait "
                f"{math.ceil(left)} s until its lease has run out"
            )
        await self._service.retire(remove_arenas=True)

    def _status(self) -> m.Status:
        service = self._service
        return m.Status(
            node=service.machine.node,
            pid=os.getpid(),
            incarnation=service.machine.highest_incarnation,
            paused=service.state.paused,
            lease_seconds_left=max(0.0, service.lease_until - time.monotonic()),
            resident_bytes=resident_bytes(),
            arenas=service.store.reports(service.machine),
            progress=service.store.progress(),
            status_file=self._status_file,
            scrub=service.scrub_counts,
        )


def _start_time(pid: int) -> int:
    try:
        return start_time_of(pid)
    except ProcessLookupError as error:
        raise ControlPlaneError(f"process {pid} is gone") from error
