"""The coordinator's connection to an SMP that is given up while an answer is awaited."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.cycle import Phase, SnapshotCycle
from megatron_ft.coordinator.events import Observers
from megatron_ft.coordinator.link import SmpLink
from megatron_ft.coordinator.timing import Timing
from megatron_ft.errors import ControlPlaneError
from megatron_ft.smp import messages as m
from megatron_ft.smp.security import JobKeys

KEYS = JobKeys.derive(bytes(32))
NOBODY = "tcp://127.0.0.1:9"


def test_who_waits_is_told_and_not_cancelled() -> None:
    async def story() -> None:
        context = zmq.asyncio.Context()
        link = SmpLink(context, "n0", NOBODY, KEYS, lambda event: None)
        answer = asyncio.create_task(link.ask(m.StatusRequest(), 30))
        await asyncio.sleep(0)
        while not link._pending:
            await asyncio.sleep(0.01)
        link.close()
        with pytest.raises(ControlPlaneError, match="n0 was given up"):
            await answer
        with pytest.raises(ControlPlaneError, match="n0 was given up"):
            await link.ask(m.StatusRequest(), 30)
        context.term()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_permits_go_on_after_an_smp_was_replaced() -> None:
    """It was asked for its progress when its connection was given up."""

    async def story() -> None:
        coordinator = Coordinator(KEYS, Observers(), lambda world: None, Timing())
        coordinator.connect("n0", NOBODY)
        cycle = SnapshotCycle(1, {"dp0": "n0"}, (), 1)
        coordinator.start_snapshots(cycle)
        link = coordinator.links["n0"]
        while len(link._pending) < 2:  # a heartbeat, and the one before a permit
            await asyncio.sleep(0.01)
        coordinator.disconnect("n0")
        while cycle.phase != Phase.CAPTURING:
            await asyncio.sleep(0.01)
        await coordinator.close()

    asyncio.run(asyncio.wait_for(story(), 100))
