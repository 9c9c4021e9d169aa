"""Silence of others, sleep of one's own, and leases that outlast both."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.smp_link import SmpLink


class Deaf(SmpLink):
    """An SMP that answers nothing, at once."""

    async def ask(self, request: m.Message, timeout: float) -> Any:
        await asyncio.sleep(0)
        raise ControlPlaneError("no answer")


async def test_a_node_is_silent_after_missed_heartbeats_and_not_after_a_sleep_of_ours() -> None:
    timing = Timing(heartbeat=0.05, lease=0.5, node_timeout=1.0)
    keys = JobKeys.derive(bytes(32))
    fleet = Fleet(keys, Observers(), timing)
    fleet.link_type = Deaf
    fleet.connect("n0", "tcp://127.0.0.1:9")
    await asyncio.sleep(0.02)
    time.sleep(2.0)  # as a process that is stopped
    await asyncio.sleep(0.02)
    assert fleet.silent_nodes(["n0"]) == []
    await fleet.alarm.wait()
    assert fleet.silent_nodes(["n0", "unknown"]) == ["n0"]
    fleet.links["n0"].missed = 0
    assert fleet.silent_nodes(["n0"]) == []
    await fleet.close()
