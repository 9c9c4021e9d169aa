"""Injecting the faults of a soak, one at a time, into a job that runs."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import RETURN_SECONDS, Injector, role_of, send
from megatron_ft.cli.chaos.job import ChaosCluster, JobFile
from megatron_ft.core import procfs
from megatron_ft.core.environment import HOST_SOCKET_NAME, JOB, NODE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.procfs import read_status
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from tests.support.chaos_cluster import EquippedCluster
from tests.support.damage import arenas, damage
from tests.support.soak import plan as p
from tests.support.soak.plan import SoakFault
from tests.support.warm_host import is_client

SOAK_CLUSTER = "tests.support.soak.inject:SoakCluster"
RESTART_CLUSTER = "tests.support.soak.inject:RestartCluster"


class SoakCluster(EquippedCluster):
    """A cluster of which only trainers are forked: SMPs are measured as a user has them."""

    def __init__(self, job: JobFile) -> None:
        super().__init__(job)
        self._supervisor_warm = ""

    def forks(self, role: str) -> bool:
        """Whether processes in a role are forked."""
        return role == "trainer" and super().forks(role)


class RestartCluster(ChaosCluster):
    """A cluster whose trainers start as a user's do."""

    def check_world(self, ranks: int) -> None:
        """The soak of snapshots tries MPI."""


def roles(job: str) -> list[tuple[str, int]]:
    """Role and number of every SMP, encoder, trainer host and trainer of a job that runs."""
    environments = {pid: procfs.read_environment(pid) for pid in procfs.own_processes()}
    ours = {pid: e for pid, e in environments.items() if e.get(JOB) == job and NODE in e}
    return [(role_of(variables), pid) for pid, variables in ours.items() if not is_client(pid)]


def in_use(processes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of ``roles``, less hosts without a trainer.

    Such a host still imports, or takes up more once it forks.
    """
    parents = {read_status(pid).get("PPid") for role, pid in processes if role == "trainer"}
    return [(role, pid) for role, pid in processes if role != "host" or str(pid) in parents]


class SoakInjector(Injector):
    """Injects faults; each call returns once everything that is to be undone is undone."""

    def __init__(self, follower: Follower, seed: int) -> None:
        super().__init__(follower)
        self._chance = random.Random(f"flips {seed}")

    async def inject(self, fault: SoakFault) -> str:
        """Strike; the words say what was done."""
        active = self.follower.active()
        node = active[fault.position % len(active)]
        return await self._ACTIONS[fault.kind](self, node, fault)

    async def _trainer(self, node: str, fault: SoakFault) -> str:
        ranks = sorted(self.pids("trainer", node))
        send(ranks[fault.local : fault.local + 1], signal.SIGKILL)
        return f"trainer {fault.local} of {node} killed"

    async def _trainers(self, node: str, fault: SoakFault) -> str:
        self.kill("trainer")
        return "all trainers killed"

    async def _host(self, node: str, fault: SoakFault) -> str:
        self.kill("host", node)
        return f"the host of {node} killed; {await self._trainer(node, fault)}"

    async def _unreachable(self, node: str, fault: SoakFault) -> str:
        (self.cluster.node_dir(node) / HOST_SOCKET_NAME).unlink(missing_ok=True)
        return f"the host of {node} without its socket; {await self._trainer(node, fault)}"

    async def _smp(self, node: str, fault: SoakFault) -> str:
        self.kill("smp", node)
        return f"the SMP of {node} killed"

    async def _encoder(self, node: str, fault: SoakFault) -> str:
        self.kill("encoder", node)
        return f"the encoder of {node} killed"

    async def _node(self, node: str, fault: SoakFault) -> str:
        back = fault.kind == p.RETURNED
        self.lose([node], keep=back)
        await asyncio.sleep(RETURN_SECONDS)
        self.revive([node])
        return f"{node} lost; back as a spare, with{'' if back else 'out'} its old memory"

    async def _pause(self, node: str, fault: SoakFault) -> str:
        self._send_all(m.Pause(True))
        await asyncio.sleep(RETURN_SECONDS)
        self._send_all(m.Pause(False))
        return "snapshots paused and resumed"

    def _send_all(self, message: m.Message) -> None:
        for path in sockets(self.cluster.root, self.job.name):
            try:
                ask(path, message)
            except MegatronFTError:
                continue  # a spare that is being started; one node's word is enough

    async def _flip(self, node: str, fault: SoakFault) -> str:
        found = arenas(self.cluster.node_dir(node))
        path = found[fault.local % len(found)]
        try:
            done = damage(path, "flip-data", self._chance)
        except (AssertionError, ValueError):
            done = "nothing committed to be damaged"
        # Only what is read again shows; a newer snapshot would soon have been in its place.
        send(self.pids("trainer", node)[:1], signal.SIGKILL)
        return f"{done}; a trainer of {node} killed"

    _ACTIONS: dict[str, Callable[[SoakInjector, str, SoakFault], Awaitable[str]]] = {
        p.TRAINER: _trainer,
        p.TRAINERS: _trainers,
        p.HOST: _host,
        p.UNREACHABLE: _unreachable,
        p.SMP: _smp,
        p.ENCODER: _encoder,
        p.NODE: _node,
        p.RETURNED: _node,
        p.PAUSED: _pause,
        p.FLIPPED: _flip,
    }
