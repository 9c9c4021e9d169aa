"""Doing to a long job what the random campaign has drawn, and undoing what must end again."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.inject import RETURN_SECONDS, Injector, send
from megatron_ft.core.environment import HOST_SOCKET_NAME, SOCKET_NAME
from megatron_ft.core.errors import ArenaError, MegatronFTError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets
from megatron_ft.smp.node_folder import STATE_NAME
from megatron_ft.smp.processes import WRITERS_NAME
from megatron_ft.supervisor.event_log import EVENTS
from tests.support import damage
from tests.support.campaign import plan as p
from tests.support.campaign.plan import ENCODERS_AWAY, SCHEDULER_AWAY, DrawnFault
from tests.support.chaos_cluster import AWAY_NAME
from tests.support.frozen_disk import FrozenDisk, stuck

START_SECONDS = 10.0
"""So long trainers are given to be started again, before the fault strikes all the same."""

DRAIN_SECONDS = 30.0
"""So long a drain is waited for, which is to be killed or to hang."""

KEPT_AWAY = 0.15
"""Encoders that are kept away are looked for this often, in seconds, and killed."""


class CampaignInjector(Injector):
    """Strikes one job.

    ``restarts`` is the moment after which trainers must have been started anew, ``drains`` that
    after which a drain must have been completed, if they must.  While the file ``stop`` is there
    training stops itself.  ``disk`` is what the job drains to, if it can be frozen.
    """

    def __init__(
        self, follower: Follower, folder: Path, limit: float, disk: FrozenDisk | None
    ) -> None:
        super().__init__(follower)
        self.restarts = self.drains = 0.0
        self.stop, self.disk, self._limit = folder / "stop", disk, limit
        self._away, self._parity = folder / AWAY_NAME, self.job.spec.scheme.parity_members
        self._active = self.job.node_names[: self.job.spec.nodes]

    async def strike(self, fault: DrawnFault) -> None:
        """Do it; what takes a while to undo is undone in the background."""
        self._active = self.follower.active() if self._has_record() else self._active
        node = self._active[fault.position % len(self._active)]
        kind, _, what = fault.kind.partition("-")
        if fault.kind == "kill-smp-at-start":
            await self._kill_at_start(node, fault)
        elif fault.kind == p.KILL_HOST:
            self.kill("host", node)
            self._kill("trainer", node)
        elif kind == "kill":
            self._kill(what, node)
        elif kind == "stop":
            self._suspend(what, node, fault.seconds)
        elif kind == "lose":
            self._lose_nodes(fault, self._parity + (what == "too-many"))
        elif kind == "arena":
            await self._damage(what, node, fault)
        elif kind == "exit":
            self._exit(what)
        elif kind == "cut":
            if what == "last-drain":
                self._exit("early" if fault.seed % 2 else "unknown")
            await self._cut_drain(fault)
        elif fault.kind == "hang-disk":
            await self._hang_disk()
        elif fault.kind == p.PAUSE:
            self._record("snapshots paused", away=False)
            self._pause(True)
            self.later(RETURN_SECONDS, lambda: self._pause(False), "snapshots resumed")
        elif fault.kind == p.RETURN_NODE:
            self.lose([node], keep=True)
        elif fault.kind == SCHEDULER_AWAY:
            self._keep_scheduler_away(fault, node)
        elif fault.kind == ENCODERS_AWAY:
            await self._keep_encoders_away(fault.seconds)
        else:
            _ON_FILES[fault.kind](self, node)
            shows = what.startswith(("socket", "state"))
            if fault.kind != p.HIDE_HOST:
                self._follow("trainers" if shows else fault.then, node)

    def _has_record(self) -> bool:
        return (self.job.notes / "job.json").exists()

    def _record(
        self, text: str, *, lost: tuple[str, ...] = (), perhaps: tuple[str, ...] = (), away: bool
    ) -> None:
        """Record what is about to be done.

        Of ``lost`` nodes the memory is gone or wrong, of ``perhaps`` it is once they are given
        up; with ``away`` a spare may be needed for them.
        """
        place = {name: self._active.index(name) for name in (*lost, *perhaps)}
        nodes = (*lost, *perhaps) if away else ()
        self.record(text, [place[name] for name in lost], nodes, place)

    def _kill(self, what: str, node: str) -> None:
        """Kill processes of a role: those of one node, or all where the role is a plural."""
        perhaps: tuple[str, ...] = ()
        if what.startswith("smp"):
            perhaps = tuple(self._active) if what == "smps" else (node,)
        one = what in ("trainer", "smp", "encoder")
        role = what if what == "world" else what.rstrip("s")
        pids = self.pids(role, node if one else "")
        where = f" on {node}" if one else ""
        if not pids:
            self._record(f"no {what} to kill{where}", away=False)
            return
        self._record(f"{what} killed{where}", perhaps=perhaps, away=False)
        if what == "supervisor":
            self.follower.process.kill()
        else:
            send(pids, signal.SIGKILL)
        if what.startswith(("trainer", "supervisor")):
            self.restarts = self.quiet

    async def _kill_at_start(self, node: str, fault: DrawnFault) -> None:
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
        self._record(f"{what} of {node} suspended for {seconds:.1f} s", perhaps=perhaps, away=True)
        self.suspend(self.pids(what, node), seconds, f"the {what}")

    def _lose_nodes(self, fault: DrawnFault, most: int) -> None:
        chance = random.Random(fault.seed)
        count = most if fault.kind == "lose-too-many" else chance.randint(1, most)
        self.lose(chance.sample(self._active, min(count, len(self._active))))

    def lose(self, nodes: Sequence[str], *, keep: bool = False) -> None:
        """Lose nodes; they are back soon, so that a job has as many spares as before."""
        words = "lost" if keep else "lost with its memory"
        self._record(f"{', '.join(nodes)} {words}", lost=tuple(nodes), away=True)
        self.restarts = self.quiet
        super().lose(nodes, keep=keep)
        self.later(RETURN_SECONDS, lambda: self.revive(nodes), f"{', '.join(nodes)} back")

    async def _damage(self, what: str, node: str, fault: DrawnFault) -> None:
        """One arena of a node is damaged, then something happens that makes it show."""
        paths = damage.arenas(self.cluster.node_dir(node))
        if not paths:
            self._record(f"no arena on {node} to damage", away=False)
            return
        try:
            older = paths[0].read_bytes() if what == "stale" else b""
            if older:
                await asyncio.sleep(0.5)
            # Before it is done: whoever sees it may answer at once.
            lost = () if what in ("flip-header", "flip-padding", "padding") else (node,)
            self._record(f"{what} in the arena of {node}", lost=lost, perhaps=(node,), away=False)
            if older:
                damage.put_back(paths[0], older)
            else:
                damage.damage(paths[0], what, random.Random(fault.seed))
        except (OSError, ArenaError, ValueError) as error:
            self._record(f"no damage to an arena of {node}: {error}", away=False)
        if what == "padding" and fault.seed % 2:
            # It shows in the snapshots of trainers that do not start anew, of every slot.
            self.later(RETURN_SECONDS, lambda: None, "a second of snapshots")
        else:
            self._follow(fault.then, node)

    def _follow(self, then: str, node: str) -> None:
        """Make damage show.  A second node is lost only where parity is for two."""
        others = [name for name in self._active if name != node]
        if then == "node" and self._parity > 1:
            self.lose(others[:1])
        elif then == "supervisor":
            self._kill("supervisor", node)
        elif then != "nothing":
            self._kill("trainers", node)

    async def _keep_encoders_away(self, seconds: float) -> None:
        """No encoder lives for long; trainers are killed meanwhile."""

        async def work() -> None:
            while True:
                self.kill("encoder")
                await asyncio.sleep(KEPT_AWAY)

        self._record(f"encoders kept away for {seconds:.1f} s", away=False)
        keeper = asyncio.create_task(work())
        try:
            await asyncio.sleep(seconds)
            self._kill("trainers", "")
            await asyncio.sleep(RETURN_SECONDS)
        finally:
            keeper.cancel()
        self.quiet = time.monotonic()

    def _keep_scheduler_away(self, fault: DrawnFault, node: str) -> None:
        """Nothing can be started for a while; something ends that has to be."""
        victim = random.Random(fault.seed).choice(["trainers", "smp", "world", "supervisor"])
        self._record(f"the scheduler away for {fault.seconds:.1f} s", away=False)
        self._away.touch()
        self.later(fault.seconds, lambda: self._away.unlink(missing_ok=True), "the scheduler back")
        self._kill(victim, node)

    def _exit(self, word: str) -> None:
        """Training stops itself, and says this word of its plan; see ENDS of its program."""
        self._record(f"training stops itself ({word})", away=False)
        self.restarts = self.quiet
        text = self.stop.with_suffix(".text")
        text.write_text(word)
        text.replace(self.stop)

    async def _cut_drain(self, fault: DrawnFault) -> None:
        """Kill the next drain half way: in one of its steps, each of which has its processes."""
        count, seen = random.Random(fault.seed).randint(1, self.job.spec.nodes + 1), set[int]()

        def struck() -> bool:
            now = self.pids("drain")
            seen.update(now)
            if due := bool(now) and len(seen) >= count:
                send(now, signal.SIGKILL)
            return due

        if await self._expect(struck):
            self._record(f"process {count} of a drain killed, or one after it", away=False)
            self.drains = self.quiet
        else:
            self._record("no drain to kill", away=False)

    async def _hang_disk(self) -> None:
        """Trainers start anew while a drain hangs in the kernel, where no signal reaches it."""
        if self.disk is None:
            self._record("no disk that can be frozen", away=False)
            return
        self.disk.freeze()
        try:
            hangs = await self._expect(lambda: bool(stuck(self.job.spec.name)))
            self._record(f"a frozen disk, a drain hangs: {hangs}", away=False)
            self._kill("trainers", "")
            await until(self._trains_again, self._limit, lambda: f"training; {self.missing()}")
        finally:
            self.disk.thaw()
        self.drains = self.quiet = time.monotonic()

    async def _expect(self, condition: Callable[[], bool]) -> bool:
        """Wait for a drain's process, in vain where the job has other things to do."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while not (holds := condition()) and time.monotonic() < deadline:
            if not self.follower.process.alive():
                break
            await asyncio.sleep(0.01)
        return holds

    def _trains_again(self) -> bool:
        self.follower.read()
        ended = not self.follower.process.alive()
        return ended or self.follower.count("training", self.restarts) > 0

    def tidy(self) -> None:
        """Leave nothing; see Injector.  No process ends on a disk that is frozen."""
        if self.disk is not None:
            self.disk.thaw()
        super().tidy()

    def _pause(self, pause: bool) -> None:
        for path in sockets(self.cluster.root, self.job.spec.name):
            # One node's word is enough; a spare's SMP may be starting.
            with suppress(MegatronFTError):
                ask(path, m.Pause(pause))

    def _hide_host(self, node: str) -> None:
        (self.cluster.node_dir(node) / HOST_SOCKET_NAME).unlink(missing_ok=True)
        self._kill("trainer", node)

    def _remove_socket(self, node: str) -> None:
        self._record(f"the socket of {node} removed", perhaps=(node,), away=False)
        (self.cluster.node_dir(node) / SOCKET_NAME).unlink(missing_ok=True)

    def _remove_folder(self, node: str) -> None:
        self._record(f"the folder of {node} removed", lost=(node,), away=False)
        shutil.rmtree(self.cluster.node_dir(node), ignore_errors=True)

    def _remove_state(self, node: str) -> None:
        self._record("the state folder removed", away=False)
        for path in set(self.job.notes.iterdir()) - {self.job.notes / EVENTS}:
            path.unlink(missing_ok=True)

    def _damage_writers(self, node: str) -> None:
        self._damage_file(node, WRITERS_NAME)

    def _damage_node_file(self, node: str) -> None:
        self._damage_file(node, STATE_NAME)

    def _damage_file(self, node: str, name: str) -> None:
        self._record(f"{name} of {node} damaged, its SMP killed", lost=(node,), away=False)
        path = self.cluster.node_dir(node) / name
        path.write_bytes(path.read_bytes()[:-7] if path.exists() else b"{")
        self.kill("smp", node)


_ON_FILES: dict[str, Callable[[CampaignInjector, str], None]] = {
    p.HIDE_HOST: CampaignInjector._hide_host,
    "remove-socket": CampaignInjector._remove_socket,
    "remove-node-folder": CampaignInjector._remove_folder,
    "remove-state": CampaignInjector._remove_state,
    "damage-writers": CampaignInjector._damage_writers,
    "damage-node-file": CampaignInjector._damage_node_file,
}
