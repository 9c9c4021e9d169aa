"""What a connection that is made anew has lost is told again, and once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.supervisor.admission import admit
from megatron_ft.supervisor.cycle import CyclePhase, SnapshotCycle
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.schedule import Schedule
from megatron_ft.supervisor.smp_link import SmpLink
from tests.support.pumps import pump
from tests.support.smp_node import SmpNode, capture, create, say

NAMES = ("n0", "n1")


@pytest.fixture(scope="module")
def smps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SmpNode]]:
    nodes = [SmpNode(tmp_path_factory.mktemp("smps"), name) for name in NAMES]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.kill()


class Job:
    """A pump and its SMPs."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        timing = Timing(heartbeat=0.2, lease=1.0, node_timeout=90.0)
        self.of = pump(timing)
        self.cycle = SnapshotCycle(incarnation, {f"dp{n}": n for n in NAMES}, (), Schedule(1))
        self.sealed: list[str] = []
        self.of.fleet.listen(self._note)

    def _note(self, event: m.NodeEvent) -> None:
        if isinstance(event.body, m.Sealed):
            self.sealed.append(event.node)

    async def begin(self, smps: list[SmpNode]) -> None:
        for name, node in zip(NAMES, smps, strict=True):
            self.of.fleet.connect(name, await node.endpoint())
        assert list(await admit(self.of.fleet, self.incarnation, NAMES, {})) == list(NAMES)
        requests = {n: create(f"dp{n}", self.incarnation) for n in NAMES}
        await self.of.fleet.ask_all({n: m.Adopt(self.incarnation, (), None) for n in NAMES})
        await self.of.fleet.ask_all(requests)
        self.of.cycle = self.cycle
        await self.of.fleet.refresh()

    async def close(self) -> None:
        """The next supervisor waits for the leases of this one, unless they end now."""
        ends = (link.ask(m.Lease(self.incarnation, 0.0, link.clock), 30) for link in self.links)
        await asyncio.gather(*ends)
        await self.of.fleet.close()

    @property
    def links(self) -> list[SmpLink]:
        return list(self.of.fleet.links.values())

    def permit(self) -> None:
        self.of._perform(self.cycle, self.cycle.propose(1, ""))


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {what} in 30 s")


async def seal_on(smps: list[SmpNode]) -> None:
    """What a trainer of each does with the slot that it was granted."""
    for node in smps:
        await asyncio.to_thread(say, node, capture(node, f"dp{node.environment.node}"))


def states(node: SmpNode) -> list[SlotState]:
    (arena,) = ask(node.environment.socket, m.StatusRequest()).arenas
    return [SlotState(slot.state) for slot in arena.slots]


def begin_if_permitted(node: SmpNode) -> None:
    """What a trainer does before it writes, once it may."""
    name = f"dp{node.environment.node}"
    with Arena.open(node.environment.node_dir / f"{name}.arena") as arena:
        permit = arena.permit()
    if permit is not None and not permit.revoked:
        say(node, m.Begins(name, permit.snapshot, permit.iteration, permit.slot))


async def until_all(smps: list[SmpNode], state: SlotState) -> None:
    for node in smps:
        for _ in range(1500):
            if state == SlotState.CAPTURING:
                await asyncio.to_thread(begin_if_permitted, node)
            if state in await asyncio.to_thread(states, node):
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(f"{node.environment.node} was not told in 30 s")


async def test_what_a_connection_that_broke_has_lost_is_told_again(smps: list[SmpNode]) -> None:
    """Nobody else would say it: the snapshot would never end, and no other would begin."""
    job = Job(1)
    await job.begin(smps)
    job.permit()
    await until_all(smps, SlotState.CAPTURING)
    link = job.of.fleet.links["n1"]
    link._socket.disconnect(link.endpoint)
    await seal_on(smps)
    await until_all(smps, SlotState.SEALED)
    assert "n1" not in job.sealed
    link._socket.connect(link.endpoint)
    await until(lambda: job.cycle.phase == CyclePhase.IDLE, "commit")
    assert sorted(job.sealed) == list(NAMES)
    await job.close()


async def test_words_of_an_smp_that_is_connected_anew_are_those_that_follow(
    smps: list[SmpNode],
) -> None:
    """Somebody took it for dead."""
    job = Job(2)
    await job.begin(smps)
    for node in ("n0", "n1"):
        job.permit()
        await until_all(smps, SlotState.CAPTURING)
        await seal_on(smps)
        await until(lambda: job.cycle.phase == CyclePhase.IDLE, "commit")
        await job.of.fleet.refresh()  # so that it keeps nothing of what it has told
        job.of.fleet.connect(node, job.of.fleet.links[node].endpoint)
    assert job.of.standing.committed == (SnapshotId(2, 2), 2, "local")
    await job.close()
