"""All that one SMP tells its coordinator: directly, or through the relay that asked it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from megatron_ft.smp import messages as m
from megatron_ft.smp.gathering import HOLD_SECONDS, Gathering
from megatron_ft.smp.node import NodeMachine
from megatron_ft.smp.outbox import Outbox
from megatron_ft.smp.reports import Reports, snapshot_of

SendTo = Callable[[bytes, m.Message], Awaitable[None]]
Later = Callable[[Awaitable[Any]], None]


class Upward:
    """``send`` is set by the server; ``coordinator`` is who has had the lease last, if anybody.

    ``later`` runs what is to happen when a relay waits no longer.
    """

    send: SendTo

    def __init__(self, machine: NodeMachine, later: Later) -> None:
        self.coordinator = b""
        self._machine, self._later = machine, later
        self.begin_life()

    def begin_life(self) -> None:
        """Forget what was told of an older incarnation."""
        self._reports, self._outbox = Reports(), Outbox(1 + secrets.randbits(31))
        self._gathering = Gathering()
        self._holding = False
        self._early: list[Any] = []

    @property
    def stream(self) -> int:
        """Of the events that are told in this life of the job."""
        return self._outbox.stream

    async def tell(self, body: Any) -> None:
        """Let the coordinator know: at once, or with the node's others, or once it is here."""
        await self._leave(self._reports.tell(body, self._machine.shards))

    async def look(self, lease: m.Lease) -> None:
        """A heartbeat, which says what has arrived: send what has waited or is missing."""
        self._outbox.heard(lease.stream, lease.told)
        early, self._early = self._early, []
        await self._leave(early)
        await self._leave(self._reports.look())
        if self._outbox.overdue():
            machine = self._machine
            event = self._outbox.again(machine.node, machine.highest_incarnation)
            await self.send(self.coordinator, event)

    def asked(self, request: Any) -> None:
        """The coordinator itself has sent a request: it gets the report on it directly."""
        if isinstance(request, m.Grant | m.Encode):
            self._gathering.end()

    def asked_through(self, request: Any, above: bytes, below: Collection[str]) -> None:
        """``above`` has passed a request on, which goes on to ``below``."""
        if isinstance(request, m.Grant | m.Encode):
            self._gathering.begin(request.snapshot, above, {self._machine.node, *below})
        else:
            self._gathering.end()

    async def gather(self, report: m.Gathered) -> None:
        """A branch below has reported."""
        if report.incarnation != self._machine.highest_incarnation:
            return
        if self._gathering.add(report):
            await self._pass_up()
        elif not self._holding:
            self._holding = True
            self._later(self._hold(self._gathering))

    async def _hold(self, gathering: Gathering) -> None:
        await asyncio.sleep(HOLD_SECONDS)
        if gathering is self._gathering:
            self._holding = False
            await self._pass_up()

    async def _pass_up(self) -> None:
        machine = self._machine
        report = self._gathering.take(machine.node, machine.highest_incarnation)
        if report is not None:
            await self.send(self._gathering.above, report)

    async def _leave(self, bodies: list[Any]) -> None:
        """These leave now, as one message; nothing if there are none."""
        if not self.coordinator:
            # An encoder may find a restarted SMP before the coordinator does.
            self._early += bodies
            return
        if not bodies:
            return
        snapshot = snapshot_of(bodies)
        if not self._gathering.takes(snapshot):
            await self._directly(bodies)
            return
        assert snapshot is not None
        node, incarnation = self._machine.node, self._machine.highest_incarnation
        event = self._outbox.relayed(node, incarnation, bodies)
        await self.gather(m.Gathered(incarnation, node, snapshot, True, (m.encode(event),)))

    async def _directly(self, bodies: list[Any]) -> None:
        machine = self._machine
        event = self._outbox.direct(machine.node, machine.highest_incarnation, bodies)
        await self.send(self.coordinator, event)
