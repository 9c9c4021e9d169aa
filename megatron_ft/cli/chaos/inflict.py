"""What the runner does to a job while the process at the point stands still.

Finding the processes of a chaos job by what they are.

What a chaos job runs in: file systems that are too small, a network that can be cut.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.cli.chaos import damage
from megatron_ft.cli.chaos.cases import ITSELF, Case, Chance
from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.job import ROLE, ChaosCluster, JobFile
from megatron_ft.cli.chaos.judge import Struck
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.fault_plan import PointReached
from megatron_ft.launchers.world import WORLD


def processes(job: str, role: str, node: str = "") -> list[int]:
    """Numbers of the job's running processes in a role, on one node or on all.

    Roles: trainer, smp, drain, encoder; "world" is the encoders with their MPI launcher.
    """
    found = []
    for pid in procfs.own_processes():
        variables = procfs.read_environment(pid)
        if variables.get(JOB) == job and node in ("", variables.get(NODE)):
            if _role(variables) == role or (role == "world" and WORLD in variables):
                found.append(pid)
    return found


def _role(variables: dict[str, str]) -> str:
    if WORLD in variables:
        return "encoder" if NODE in variables else "launcher"
    return variables.get(ROLE, "")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal those that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


_SMALL = {"memory": "192k", "disk": "64k"}
"""Room for an SMP's own files and no arena; for no shard of a checkpoint."""


class Surroundings:
    """Made before the job starts, undone when nothing of it runs any more."""

    def __init__(self, case: Case, job: JobFile, cluster: ChaosCluster) -> None:
        self._victim = case.victim
        self._network = cluster.network
        self._small: Path | None = None
        if case.fault == "full":
            spare = cluster.node_dir(job.node_names[job.nodes])
            self._small = job.drain_dir if case.victim == "disk" else spare

    def prepare(self) -> None:
        """Make the network, or mount what is to be small, which needs root."""
        if self._network is not None:
            self._network.open()
        if self._small is not None:
            self._small.mkdir(mode=0o700, parents=True, exist_ok=True)
            options = f"size={_SMALL[self._victim]},mode=700"
            _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._small))

    def make_room(self) -> None:
        """What was small is large enough now."""
        assert self._small is not None
        _run("mount", "-o", "remount,size=256m", str(self._small))

    def cut(self, node: str) -> None:
        """No packet passes between a node and all others."""
        assert self._network is not None
        self._network.cut(node)

    def delay(self, node: str, milliseconds: float) -> None:
        """Every packet to and from a node takes so much longer; 0 for no longer."""
        assert self._network is not None
        self._network.delay(node, milliseconds)

    def heal(self) -> None:
        """All packets pass again."""
        assert self._network is not None
        self._network.heal()

    def unmount(self) -> None:
        """Give the small file system up, before its folder is removed."""
        if self._small is not None:
            subprocess.run(
                ["umount", "-l", str(self._small)], check=False, stderr=subprocess.DEVNULL
            )

    def close(self) -> None:
        """Remove the network, when no process is left in it."""
        if self._network is not None:
            self._network.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


LATENCY_MILLISECONDS = 150.0
"""One way: a hundred times that of a cluster's network, far below any lease."""


@dataclass
class Inflicter:
    """Carries one case's faults out.  ``strikes`` is what was done, ``quiet`` when it was over.

    ``cures`` undo what would keep the job from going on: they run in the background.
    """

    case: Case
    chance: Chance
    follower: Follower
    strikes: list[Struck] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    quiet: float = 0.0
    cures: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.job = self.follower.job
        self.cluster = self.job.cluster()
        self.surroundings = Surroundings(self.case, self.job, self.cluster)

    @property
    def suspension(self) -> float:
        """Seconds of a SIGSTOP: until all that waits for the process has given it up."""
        leased = self.case.victim in ("smp", "supervisor")
        return 2.0 * self.job.lease if leased else self.job.lease

    def note(
        self,
        text: str,
        lost: tuple[int, ...] = (),
        nodes: tuple[str, ...] = (),
        suspended: dict[str, int] | None = None,
    ) -> None:
        """Remember what is about to be done."""
        now = time.monotonic()
        self.strikes.append(Struck(now, text, lost, nodes, suspended or {}))
        self.quiet = now

    # What leads to a point.

    def provoke(self) -> None:
        """Have happen what must, before the point is reached."""
        active = self.follower.active()
        node = active[self.chance.position % len(active)]
        occasion = self.case.at.occasion
        if occasion == "trainer lost":
            self.note(f"a trainer of {node} killed")
            send(processes(self.job.name, "trainer", node)[:1], signal.SIGKILL)
        elif occasion == "node lost":
            self.lose([node], keep=False)
        elif occasion == "smp lost":
            self.note(f"the SMP of {node} killed", suspended={node: active.index(node)})
            send(processes(self.job.name, "smp", node), signal.SIGKILL)
        elif occasion == "supervisor lost":
            self.note("the supervisor killed")
            self.follower.process.kill()

    # The fault itself.

    def strike(self, arrival: PointReached) -> None:
        """All of the case, at the process that has arrived; it goes on when this returns."""
        where = f"{arrival.point} on {arrival.node or 'the supervisor'} (process {arrival.pid})"
        active = self.follower.active()
        node = arrival.node or active[self.chance.position % len(active)]
        self._victim(arrival, node, where)
        others = [active[p] for p in self.chance.order if p < len(active)]
        left = [n for n in others if n not in self.lost]
        left.sort(key=lambda name: name == node)
        if self.case.losses:
            self.lose(left[: self.case.losses], keep=False)

    def _victim(self, arrival: PointReached, node: str, where: str) -> None:
        victim, fault = self.case.victim, self.case.fault
        own = victim == self.case.at.role
        if fault in ITSELF:
            self.note(f"{fault} in {where}", **self._may_be_given_up(node))
        elif victim == "node":
            self.lose([node], keep=fault == "return")
        elif victim == "arena":
            self._damage(node)
        elif victim in ("memory", "disk", "network"):
            _ELSEWHERE[victim, fault](self, node)
        elif own:
            self._signal([arrival.pid], where, node)
        elif victim == "supervisor":
            self._signal([self.follower.process.pid], f"the supervisor at {where}", node)
        else:
            role = "trainer" if victim == "trainers" else victim
            place = "" if victim in ("trainers", "world") else node
            self._signal(
                processes(self.job.name, role, place), f"{victim} of {node} at {where}", node
            )

    def _may_be_given_up(self, node: str) -> dict[str, Any]:
        """An SMP that is gone or silent may cost its node, with what it holds."""
        active = self.follower.active()
        if self.case.victim != "smp":
            return {"suspended": {}}
        return {"suspended": {node: active.index(node) if node in active else -1}}

    def _signal(self, pids: list[int], whom: str, node: str) -> None:
        """SIGKILL or SIGSTOP; who is at the point itself does the former to itself."""
        if self.case.fault == "kill":
            self.note(f"SIGKILL to {whom}", **self._may_be_given_up(node))
            if self.case.victim != self.case.at.role:
                send(pids, signal.SIGKILL)
            return
        self.note(f"SIGSTOP to {whom}", **self._may_be_given_up(node))
        send(pids, signal.SIGSTOP)
        self._later(self.suspension, lambda: send(pids, signal.SIGCONT), f"SIGCONT to {whom}")

    def lose(self, nodes: list[str], *, keep: bool) -> None:
        """Kill nodes with their memory, or keep that and let them come back."""
        active = self.follower.active()
        for node in nodes:
            self.lost[node] = active.index(node)
        words = "lost, to come back" if keep else "lost with its memory"
        positions = tuple(self.lost[node] for node in nodes)
        self.note(f"{', '.join(nodes)} {words}", positions, tuple(nodes))
        for node in nodes:
            self.cluster.kill_node(node, keep_folder=keep)
        if keep:
            self._later(1.0, lambda: self._return(nodes), "the node is back")

    def _return(self, nodes: list[str]) -> None:
        for node in nodes:
            self.cluster.revive(node)

    def _damage(self, node: str) -> None:
        """Damage shows when the arena is read again: all trainers start anew."""
        (path, *_) = sorted(self.cluster.node_dir(node).glob("*.arena"))
        chance = random.Random(f"{self.case} {self.chance}")
        position = self.follower.active().index(node)
        lost = () if self.case.fault == "flip-header" else (position,)
        done = damage.damage(path, self.case.fault, chance)
        self.note(f"{done}; trainers killed", lost, suspended={node: position})
        send(processes(self.job.name, "trainer"), signal.SIGKILL)

    def _later(self, seconds: float, cure: Callable[[], object], text: str) -> None:
        async def work() -> None:
            await asyncio.sleep(seconds)
            cure()
            self.quiet = time.monotonic()

        task: Coroutine[Any, Any, None] = work()
        self.cures.add(asyncio.get_running_loop().create_task(task, name=text))

    def cured(self) -> bool:
        """Whether all that was to be undone is."""
        return all(cure.done() for cure in self.cures)

    # What a job runs in.

    def fill_memory(self, node: str) -> None:
        """The spare that will take over has no room for an arena, until it gets some."""
        self.lose([node], keep=False)
        self._later(2.0, self.surroundings.make_room, "the spare has room again")

    def fill_disk(self, node: str) -> None:
        """Drains have met a full disk from the start; now it gets room."""
        self.note("the drain folder was full until now")
        self.surroundings.make_room()

    def slow_disk(self, node: str) -> None:
        """Writes are slow by a strike of its own that repeats."""
        self.note("every write of a drain takes long")

    def cut(self, node: str) -> None:
        """Cut the node's network, and heal it when it must have been replaced."""
        self.note(f"{node} cut off", suspended={node: self.follower.active().index(node)})
        self.surroundings.cut(node)
        self._later(2.5 * self.job.lease, self.surroundings.heal, f"{node} is on the network again")

    def delay_packets(self, node: str) -> None:
        """A round trip to the node takes long, for two leases: nobody may be taken for dead."""
        self.note(f"packets to and from {node} take {LATENCY_MILLISECONDS:g} ms longer")
        self.surroundings.delay(node, LATENCY_MILLISECONDS)
        undo = functools.partial(self.surroundings.delay, node, 0)
        self._later(2 * self.job.lease, undo, f"packets of {node} are as fast as before")

    def tidy(self) -> None:
        """Nothing stays: no mount, no process, no folder in shared memory, no network."""
        for cure in self.cures:
            cure.cancel()
        self.surroundings.unmount()
        self.follower.end()
        self.cluster.destroy()
        self.surroundings.close()


_ELSEWHERE = {
    ("memory", "full"): Inflicter.fill_memory,
    ("disk", "full"): Inflicter.fill_disk,
    ("disk", "slow"): Inflicter.slow_disk,
    ("network", "cut"): Inflicter.cut,
    ("network", "latency"): Inflicter.delay_packets,
}
