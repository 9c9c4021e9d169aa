"""Hosts that a running job may get in place of lost ones, and waiting for them.

A job without a spare need not stop: what memory can serve is on disk by then (salvage.py) and
stays in memory, so a host that comes in time is rebuilt from parity like any spare.
"""

from __future__ import annotations

import asyncio
import time

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.launcher import HostSource
from megatron_ft.supervisor.job_parts import JobParts

LOOK_SECONDS = 1.0


async def hold_for_hosts(parts: JobParts, missing: int) -> bool:
    """Wait for ``missing`` hosts; whether all have come.  SMPs and memory stay meanwhile.

    False at once where the job's place has no source of them.
    """
    source, tell = parts.hosts, parts.observers.tell
    if source is None:
        return False
    parts.world.stop()
    try:
        asked = await asyncio.to_thread(source.request, missing)
    except MegatronFTError as error:
        tell("hold_refused", f"no replacement host can be asked for: {error}")
        return False
    tell("holding", f"memory is held for up to {source.seconds:g} s, until there is {asked}")
    if await _all_come(parts, source, missing):
        return True
    await asyncio.to_thread(source.withdraw)
    tell("held_in_vain", f"no replacement host came within {source.seconds:g} s")
    return False


async def _all_come(parts: JobParts, source: HostSource, missing: int) -> bool:
    deadline = time.monotonic() + source.seconds
    while time.monotonic() < deadline:
        # Only the scheduler knows, and it tells nobody.
        come = await asyncio.to_thread(source.arrived)
        for node in come:
            parts.observers.tell("host", f"{node} has come as a replacement host", node=node)
        missing -= len(come)
        if missing <= 0:
            return True
        await asyncio.sleep(LOOK_SECONDS)
    return False
