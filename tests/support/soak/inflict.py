"""Doing to a running job what the plan says."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

from megatron_ft.cli.chaos.damage import damage
from megatron_ft.cli.chaos.inflict import processes, send
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from tests.support.soak import plan as p
from tests.support.soak.job import SoakCluster, SoakFollower
from tests.support.soak.plan import Fault

AWAY_SECONDS = 1.0
"""How long a lost node stays away, and a pause lasts."""


class Inflicter:
    """Carries faults out, one at a time; each returns once what it takes back is taken back."""

    def __init__(self, follower: SoakFollower, cluster: SoakCluster, seed: int) -> None:
        self._follower, self._cluster = follower, cluster
        self._chance = random.Random(f"flips {seed}")
        self._job = follower.job.name

    async def inflict(self, fault: Fault) -> str:
        """Strike; what was done, in words."""
        active = self._follower.active()
        node = active[fault.position % len(active)]
        return await self._ACTIONS[fault.kind](self, node, fault)

    async def _trainer(self, node: str, fault: Fault) -> str:
        ranks = sorted(processes(self._job, "trainer", node))
        send(ranks[fault.local : fault.local + 1], signal.SIGKILL)
        return f"trainer {fault.local} of {node} killed"

    async def _smp(self, node: str, fault: Fault) -> str:
        send(processes(self._job, "smp", node), signal.SIGKILL)
        return f"the SMP of {node} killed"

    async def _encoder(self, node: str, fault: Fault) -> str:
        send(processes(self._job, "encoder", node), signal.SIGKILL)
        return f"the encoder of {node} killed"

    async def _node(self, node: str, fault: Fault) -> str:
        back = fault.kind == p.RETURNED
        self._cluster.kill_node(node, keep_folder=back)
        await asyncio.sleep(AWAY_SECONDS)
        self._cluster.revive(node)
        return f"{node} lost; back as a spare, with{'' if back else 'out'} its old memory"

    async def _pause(self, node: str, fault: Fault) -> str:
        self._say(m.Pause(True))
        await asyncio.sleep(AWAY_SECONDS)
        self._say(m.Pause(False))
        return "snapshots paused and resumed"

    def _say(self, message: m.Message) -> None:
        for path in sockets(self._cluster.root, self._job):
            try:
                ask(path, message)
            except MegatronFTError:
                continue  # a spare that is being started; one node's word is enough

    async def _flip(self, node: str, fault: Fault) -> str:
        arenas = sorted(self._cluster.node_dir(node).glob("*.arena"))
        path = arenas[fault.local % len(arenas)]
        try:
            done = damage(path, "flip-data", self._chance)
        except (AssertionError, ValueError):
            done = "nothing committed to be damaged"
        # Only what is read again shows; a newer snapshot would soon have been in its place.
        send(processes(self._job, "trainer", node)[:1], signal.SIGKILL)
        return f"{done}; a trainer of {node} killed"

    _ACTIONS: dict[str, Callable[[Inflicter, str, Fault], Awaitable[str]]] = {
        p.TRAINER: _trainer,
        p.SMP: _smp,
        p.ENCODER: _encoder,
        p.NODE: _node,
        p.RETURNED: _node,
        p.PAUSED: _pause,
        p.FLIPPED: _flip,
    }
