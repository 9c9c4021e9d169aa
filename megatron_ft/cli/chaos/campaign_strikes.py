"""Doing to a long job what the random campaign has drawn, and undoing what must end again."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_ft.cli.chaos import damage
from megatron_ft.cli.chaos.campaign_plan import ENCODERS_AWAY, Fault
from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inflict import processes, send
from megatron_ft.cli.chaos.judge import Struck
from megatron_ft.core.environment import SOCKET_NAME
from megatron_ft.core.errors import ArenaError
from megatron_ft.smp.node_folder import STATE_NAME
from megatron_ft.smp.processes import WRITERS_NAME

BACK_SECONDS = 1.0
"""A lost node is back so much later, empty, so that a job has as many spares as before."""

START_SECONDS = 10.0
"""So long trainers are given to be started again, before the fault strikes all the same."""

NEEDS_A_START = ("truncate", "folder", "link", "missing")
"""Damage after which a shard has its arena again only when trainers start."""

KEPT_AWAY = 0.15
"""Encoders that are kept away are looked for this often, in seconds, and killed."""


class Striker:
    """Strikes one job.  ``strikes`` is what was done, ``quiet`` when the last of it was over.

    ``restarts`` is the moment after which trainers must have been started anew, if they must.
    """

    def __init__(self, follower: Follower, spares: int) -> None:
        self.follower, self.job = follower, follower.job
        self.cluster = self.job.cluster()
        self.strikes: list[Struck] = []
        self.quiet = self.restarts = 0.0
        self._spares = spares
        self._cures: set[asyncio.Task[None]] = set()
        self._active = self.job.node_names[: self.job.nodes]

    def cured(self) -> bool:
        """Whether all that was to be undone is."""
        return all(cure.done() for cure in self._cures)

    def curing(self) -> list[str]:
        """What is still to be undone."""
        return [cure.get_name() for cure in self._cures if not cure.done()]

    def tidy(self) -> None:
        """Nothing stays: no process, no folder in shared memory."""
        for cure in self._cures:
            cure.cancel()
        self.follower.end()
        self.cluster.destroy()

    async def strike(self, fault: Fault) -> None:
        """Do it; what takes a while to undo is undone in the background."""
        self._active = self.follower.active() if self._has_notes() else self._active
        node = self._active[fault.position % len(self._active)]
        kind, _, what = fault.kind.partition("-")
        if fault.kind == "kill-smp-at-start":
            await self._kill_at_start(node, fault)
        elif kind == "kill":
            self._kill(what, node)
        elif kind == "stop":
            self._suspend(what, node, fault.seconds)
        elif kind == "lose":
            self._lose_nodes(fault, self.job.parity + (what == "too-many"))
        elif kind == "arena":
            await self._damage(what, node, fault)
        elif fault.kind == ENCODERS_AWAY:
            await self._keep_encoders_away(fault.seconds)
        else:
            _ON_FILES[fault.kind](self, node)
            self._follow("trainers" if what.startswith(("socket", "state")) else fault.then, node)

    def _has_notes(self) -> bool:
        return (self.job.state_dir / "job.json").exists()

    def _note(
        self, text: str, *, lost: tuple[str, ...] = (), perhaps: tuple[str, ...] = (), away: bool
    ) -> None:
        """Remember what is about to be done.

        Of ``lost`` nodes the memory is gone or wrong, of ``perhaps`` it is once they are given
        up; with ``away`` a spare may be needed for them.
        """
        self.quiet = time.monotonic()
        place = {name: self._active.index(name) for name in (*lost, *perhaps)}
        gone = tuple(place[name] for name in lost)
        nodes = (*lost, *perhaps) if away else ()
        self.strikes.append(Struck(self.quiet, text, gone, nodes, place))

    def _kill(self, what: str, node: str) -> None:
        """Kill processes of a role: those of one node, or all where the role is a plural."""
        perhaps: tuple[str, ...] = ()
        if what.startswith("smp"):
            perhaps = tuple(self._active) if what == "smps" else (node,)
        one = what in ("trainer", "smp", "encoder")
        role = what if what == "world" else what.rstrip("s")
        pids = [self.follower.process.pid]
        if what != "supervisor":
            pids = processes(self.job.name, role, node if one else "")
        where = f" on {node}" if one else ""
        if not pids:
            self._note(f"no {what} to kill{where}", away=False)
            return
        self._note(f"{what} killed{where}", perhaps=perhaps, away=False)
        if what == "supervisor":
            self.follower.process.kill()
        else:
            send(pids, signal.SIGKILL)
        if what.startswith(("trainer", "supervisor")):
            self.restarts = self.quiet

    async def _kill_at_start(self, node: str, fault: Fault) -> None:
        """Trainers that start ask their SMP what to restore; a new one may not know it yet."""
        self._kill("trainers", "")
        killed, deadline = self.quiet, self.quiet + START_SECONDS
        while not self.follower.count("trainers_started", killed) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            self.follower.read()
        await asyncio.sleep(random.Random(fault.seed).uniform(0.0, 0.5))
        self._kill("smp", node)

    def _suspend(self, what: str, node: str, seconds: float) -> None:
        perhaps = tuple(self._active) if what == "supervisor" else (node,) * (what == "smp")
        self._note(f"{what} of {node} suspended for {seconds:.1f} s", perhaps=perhaps, away=True)
        pids = [self.follower.process.pid]
        if what != "supervisor":
            pids = processes(self.job.name, what, node)
        send(pids, signal.SIGSTOP)
        self._later(seconds, lambda: send(pids, signal.SIGCONT), f"SIGCONT to the {what}")

    def _lose_nodes(self, fault: Fault, most: int) -> None:
        chance = random.Random(fault.seed)
        count = most if fault.kind == "lose-too-many" else chance.randint(1, most)
        self._lose(chance.sample(self._active, min(count, len(self._active))))

    def _lose(self, nodes: list[str]) -> None:
        self._note(f"{', '.join(nodes)} lost with its memory", lost=tuple(nodes), away=True)
        self.restarts = self.quiet
        for node in nodes:
            self.cluster.kill_node(node)
        self._later(BACK_SECONDS, lambda: self._revive(nodes), f"{', '.join(nodes)} back")

    def _revive(self, nodes: list[str]) -> None:
        for node in nodes:
            self.cluster.revive(node)

    async def _damage(self, what: str, node: str, fault: Fault) -> None:
        """One arena of a node is damaged, then something happens that makes it show."""
        paths = sorted(self.cluster.node_dir(node).glob("*.arena"))
        if not paths:
            self._note(f"no arena on {node} to damage", away=False)
            return
        try:
            older = paths[0].read_bytes() if what == "stale" else b""
            if older:
                await asyncio.sleep(0.5)
            # Before it is done: whoever sees it may answer at once.
            lost = () if what == "flip-header" else (node,)
            self._note(f"{what} in the arena of {node}", lost=lost, perhaps=(node,), away=False)
            if older:
                damage.put_back(paths[0], older)
            else:
                damage.damage(paths[0], what, random.Random(fault.seed))
        except (OSError, ArenaError, ValueError) as error:
            self._note(f"no damage to an arena of {node}: {error}", away=False)
        # Trainers that run have no arena any more, and take no snapshot until they start again.
        waits = fault.then == "nothing" and what in NEEDS_A_START
        self._follow("trainers" if waits else fault.then, node)

    def _follow(self, then: str, node: str) -> None:
        """What makes damage show.  A second node is lost only where parity is for two."""
        others = [name for name in self._active if name != node]
        if then == "node" and self.job.parity > 1:
            self._lose(others[:1])
        elif then == "supervisor":
            self._kill("supervisor", node)
        elif then != "nothing":
            self._kill("trainers", node)

    async def _keep_encoders_away(self, seconds: float) -> None:
        """No encoder lives for long; trainers are killed meanwhile."""

        async def work() -> None:
            while True:
                send(processes(self.job.name, "encoder"), signal.SIGKILL)
                await asyncio.sleep(KEPT_AWAY)

        self._note(f"encoders kept away for {seconds:.1f} s", away=False)
        keeper = asyncio.create_task(work())
        try:
            await asyncio.sleep(seconds)
            self._kill("trainers", "")
            await asyncio.sleep(BACK_SECONDS)
        finally:
            keeper.cancel()
        self.quiet = time.monotonic()

    def _remove_socket(self, node: str) -> None:
        self._note(f"the socket of {node} removed", perhaps=(node,), away=False)
        (self.cluster.node_dir(node) / SOCKET_NAME).unlink(missing_ok=True)

    def _remove_folder(self, node: str) -> None:
        self._note(f"the folder of {node} removed", lost=(node,), away=False)
        shutil.rmtree(self.cluster.node_dir(node), ignore_errors=True)

    def _remove_state(self, node: str) -> None:
        self._note("the state folder removed", away=False)
        shutil.rmtree(self.job.state_dir, ignore_errors=True)

    def _damage_writers(self, node: str) -> None:
        self._damage_file(node, WRITERS_NAME)

    def _damage_node_file(self, node: str) -> None:
        self._damage_file(node, STATE_NAME)

    def _damage_file(self, node: str, name: str) -> None:
        self._note(f"{name} of {node} damaged, its SMP killed", lost=(node,), away=False)
        path = self.cluster.node_dir(node) / name
        path.write_bytes(path.read_bytes()[:-7] if path.exists() else b"{")
        send(processes(self.job.name, "smp", node), signal.SIGKILL)

    def _later(self, seconds: float, cure: Callable[[], object], text: str) -> None:
        async def work() -> None:
            await asyncio.sleep(seconds)
            cure()
            self.quiet = time.monotonic()

        task: Coroutine[Any, Any, None] = work()
        self._cures.add(asyncio.create_task(task, name=text))


_ON_FILES: dict[str, Callable[[Striker, str], None]] = {
    "remove-socket": Striker._remove_socket,
    "remove-node-folder": Striker._remove_folder,
    "remove-state": Striker._remove_state,
    "damage-writers": Striker._damage_writers,
    "damage-node-file": Striker._damage_node_file,
}
