"""Injecting faults into a job that runs, from outside: signals, and lost nodes.

Injector has what the demo, chaos cases and random campaigns do to a job, and keeps a record of
it for the judge.  CaseInjector carries out one chaos case.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_ft.cli.chaos.cases import ITSELF, Case, Chance
from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.judge import Struck
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.fault_plan import PointReached
from megatron_ft.launchers import trainer_host
from megatron_ft.launchers.world import WORLD

RETURN_SECONDS = 1.0
"""A lost node that is to return is away for so long."""


def processes(job: str, role: str, node: str = "", rank: int | None = None) -> list[int]:
    """Numbers of the job's running processes in a role, on one node or on all.

    Roles: trainer (also of one ``rank``), smp, host, drain, encoder; "world" is the encoders with
    their MPI launcher.
    """
    found = []
    for pid in procfs.own_processes():
        variables = procfs.read_environment(pid)
        here = variables.get(JOB) == job and node in ("", variables.get(NODE))
        if not here or (rank is not None and variables.get("RANK") != str(rank)):
            continue
        if (role == "world" and WORLD in variables) or role_of(pid, variables) == role:
            found.append(pid)
    return found


def role_of(pid: int, variables: Mapping[str, str]) -> str:
    """The role of a process of a job, by its environment and its command; "" for any other."""
    if WORLD in variables:
        return "encoder" if NODE in variables else "launcher"
    if "RANK" in variables:
        return "trainer"
    words = procfs.read_command(pid)
    if trainer_host.__file__ in words:
        return "host"
    ours = (word for word in words if word.startswith("megatron_ft."))
    return _ROLES.get(".".join(next(ours, "").split(".")[:2]), "")


_ROLES = {"megatron_ft.smp": "smp", "megatron_ft.checkpoint": "drain"}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Injector:
    """Injects faults into one job.

    ``strikes`` records what was done, ``quiet`` is the moment when the last of it was over.
    Cures undo what would keep the job from continuing: they run in the background.
    """

    def __init__(self, follower: Follower) -> None:
        self.follower, self.job, self.cluster = follower, follower.job, follower.cluster
        self.strikes: list[Struck] = []
        self.quiet = 0.0
        self._cures: set[asyncio.Task[None]] = set()

    def record(
        self,
        text: str,
        lost: Sequence[int] = (),
        nodes: Sequence[str] = (),
        suspended: Mapping[str, int] | None = None,
    ) -> None:
        """Record a strike before it is carried out: the job may react at once."""
        self.quiet = time.monotonic()
        self.strikes.append(Struck(self.quiet, text, tuple(lost), tuple(nodes), suspended or {}))

    def pids(self, role: str, node: str = "") -> list[int]:
        if role == "supervisor":
            return [self.follower.process.pid]
        return processes(self.job.spec.name, role, node)

    def kill(self, role: str, node: str = "") -> None:
        send(self.pids(role, node), signal.SIGKILL)

    def suspend(self, pids: Sequence[int], seconds: float, whom: str) -> None:
        send(pids, signal.SIGSTOP)
        self.later(seconds, lambda: send(pids, signal.SIGCONT), f"SIGCONT to {whom}")

    def lose(self, nodes: Sequence[str], *, keep: bool = False) -> None:
        """Kill everything on nodes; their memory is gone unless ``keep``."""
        for node in nodes:
            self.cluster.kill_node(node, keep_folder=keep)

    def revive(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self.cluster.revive(node)

    def later(self, seconds: float, cure: Callable[[], object], text: str) -> None:

        async def work() -> None:
            await asyncio.sleep(seconds)
            cure()
            self.quiet = time.monotonic()

        task: Coroutine[Any, Any, None] = work()
        self._cures.add(asyncio.get_running_loop().create_task(task, name=text))

    def curing(self) -> list[str]:
        return [cure.get_name() for cure in self._cures if not cure.done()]

    def missing(self) -> str:
        done = self.follower.protected_commits(self.quiet)
        wanted = [f"2 protected snapshots after the fault ({done} so far)", *self.curing()]
        return f"{', '.join(wanted)}; the last events:\n{self.follower.tail()}"

    def tidy(self) -> None:
        for cure in self._cures:
            cure.cancel()
        self.follower.end()


class CaseInjector(Injector):
    """Carries out the faults of one case."""

    def __init__(self, case: Case, chance: Chance, follower: Follower) -> None:
        super().__init__(follower)
        self.case, self.chance = case, chance
        self.lost: dict[str, int] = {}

    def provoke(self) -> None:
        """Cause the occasion on which the point is reached."""
        active = self.follower.active()
        node = active[self.chance.position % len(active)]
        occasion = self.case.at.occasion
        if occasion == "trainer lost":
            self.record(f"a trainer of {node} killed")
            send(self.pids("trainer", node)[:1], signal.SIGKILL)
        elif occasion == "node lost":
            self.lose([node])
        elif occasion == "smp lost":
            self.record(f"the SMP of {node} killed", suspended={node: active.index(node)})
            self.kill("smp", node)
        elif occasion == "supervisor lost":
            self.record("the supervisor killed")
            self.follower.process.kill()

    def strike(self, reached: PointReached) -> None:
        """Carry out the case; the process at the point continues when this returns."""
        active = self.follower.active()
        node = reached.node or active[self.chance.position % len(active)]
        self._strike_victim(reached, node)
        others = [active[p] for p in self.chance.order if p < len(active)]
        left = [n for n in others if n not in self.lost]
        left.sort(key=lambda name: name == node)
        if self.case.losses:
            self.lose(left[: self.case.losses])

    def _strike_victim(self, reached: PointReached, node: str) -> None:
        where = f"{reached.point} on {reached.node or 'the supervisor'} (process {reached.pid})"
        victim, fault = self.case.victim, self.case.fault
        if fault in ITSELF:
            self.record(f"{fault} in {where}", suspended=self._may_be_given_up(node))
        elif victim == "node":
            self.lose([node], keep=fault == "return")
        elif victim == self.case.at.role:
            self._signal([reached.pid], where, node)
        else:
            role = "trainer" if victim == "trainers" else victim
            pids = self.pids(role, "" if victim in ("trainers", "world") else node)
            self._signal(pids, f"{victim} of {node} at {where}", node)

    def _may_be_given_up(self, node: str) -> dict[str, int]:
        """Nodes that the job may give up because their SMP is gone or silent, with positions."""
        active = self.follower.active()
        if self.case.victim != "smp":
            return {}
        return {node: active.index(node) if node in active else -1}

    def _signal(self, pids: list[int], whom: str, node: str) -> None:
        """SIGKILL or SIGSTOP; the process at the point does the former to itself."""
        number = "SIGKILL" if self.case.fault == "kill" else "SIGSTOP"
        self.record(f"{number} to {whom}", suspended=self._may_be_given_up(node))
        if self.case.fault != "kill":
            # Until every process that waits for this one has given it up.
            leases = 2.0 if self.case.victim in ("smp", "supervisor") else 1.0
            self.suspend(pids, leases * self.job.spec.timing.lease, whom)
        elif self.case.victim != self.case.at.role:
            send(pids, signal.SIGKILL)

    def lose(self, nodes: Sequence[str], *, keep: bool = False) -> None:
        active = self.follower.active()
        self.lost |= {node: active.index(node) for node in nodes}
        words = "lost, to come back" if keep else "lost with its memory"
        self.record(f"{', '.join(nodes)} {words}", [self.lost[node] for node in nodes], nodes)
        super().lose(nodes, keep=keep)
        if keep:
            self.later(RETURN_SECONDS, lambda: self.revive(nodes), "the node is back")
