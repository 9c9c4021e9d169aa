"""Requests to many nodes go through some of them; who has not answered is asked directly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smp_node import SECRET, SmpNode, capture, create, run, say

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.coordinator import tree
from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.cycle import Phase, SnapshotCycle
from megatron_ft.coordinator.events import Observers
from megatron_ft.coordinator.link import SmpLink
from megatron_ft.coordinator.recovery import admit
from megatron_ft.coordinator.schedule import Schedule
from megatron_ft.coordinator.timing import Timing
from megatron_ft.coordinator.tree import Branch, answers, branches, unreached, wrapped
from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m
from megatron_ft.smp.local_query import ask
from megatron_ft.smp.relay import joined
from megatron_ft.smp.security import JobKeys

NAMES = ("n0", "n1", "n2", "n3")


@given(st.integers(0, 200), st.integers(2, 33))
def test_every_node_is_in_the_tree_once(count: int, fan_out: int) -> None:
    nodes = [f"n{i}" for i in range(count)]
    top = branches(nodes, fan_out)
    assert [node for branch in top for node in branch.nodes()] == nodes

    def check(below: tuple[Branch, ...]) -> None:
        assert len(below) <= fan_out
        sizes = [len(branch.nodes()) for branch in below]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        for branch in below:
            check(branch.below)

    check(top)


@pytest.mark.parametrize("nodes, depth", [(32, 1), (33, 2), (1056, 2), (1057, 3), (33824, 3)])
def test_it_is_as_deep_as_the_logarithm(nodes: int, depth: int) -> None:
    tree = branches([str(i) for i in range(nodes)], 32)
    assert max(branch.depth() for branch in tree) == depth


def test_a_relay_is_doubted_and_not_those_below_it() -> None:
    (branch,) = branches("abcdefg", 1)
    assert unreached(branch, {}) == ["a"]
    assert unreached(branch, set("abc")) == ["d"]
    assert unreached(branch, set("abcdefg")) == []


@given(st.sets(st.sampled_from("abcdefg")), st.sets(st.sampled_from("abcdefg")))
def test_answers_come_back_from_whom_they_are(silent: set[str], refusing: set[str]) -> None:
    """Relays as pure functions: each opens its part, adds its answer and joins those below."""
    requests: dict[str, m.Message] = {n: m.Abort(1, (1, 1), n) for n in "abcdefg"}  # type: ignore[arg-type]
    (branch,) = branches("abcdefg", 1)[:1]
    top = wrapped(branch, 1, requests, dict.fromkeys("abcdefg", "tcp://x"), 2.0)

    def relay(request: m.PassOn) -> m.Passed:
        if request.node in silent:
            return m.Passed((), {})
        own = m.decode(request.request)
        assert own == requests[request.node] and own.reason == request.node
        answer: m.Message = m.Refused("X", own.reason) if own.reason in refusing else m.Ok()
        inner = [m.decode(onward.frame) for onward in request.below]
        assert all(one.patience < request.patience for one in inner)
        passed = joined(request.node, answer, [relay(one) for one in inner])
        return m.decode(m.encode(passed))  # type: ignore[no-any-return]

    reached = "abcdefg"[: min(("abcdefg".index(n) for n in silent), default=7)]
    expected = {n: m.Refused("X", n) if n in refusing else m.Ok() for n in reached}
    assert answers(relay(top)) == expected


class Counting(SmpLink):
    """A link that notes what is asked directly, and over which connection words came."""

    asked: Counter[tuple[str, str]] = Counter()
    came: list[tuple[str, str, tuple[str, ...]]] = []

    def _hear(self, report: m.Event | m.Gathered) -> None:
        direct = isinstance(report, m.Event)
        frames = () if isinstance(report, m.Event) else report.frames
        of = (self.node,) if direct else tuple(sorted(m.decode(f).node for f in frames))
        self.came.append((self.node, type(report).__name__, of))
        super()._hear(report)

    async def ask(self, request: m.Message, timeout: float) -> Any:
        self.asked[self.node, type(request).__name__] += 1
        return await super().ask(request, timeout)


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


class Chain:
    """A coordinator above SMPs of which each ``fan_out``-th passes on to those behind it."""

    def __init__(self, incarnation: int, heartbeat: float = 0.2, fan_out: int = 1) -> None:
        self.incarnation = incarnation
        timing = Timing(heartbeat=heartbeat, lease=5 * heartbeat, node_timeout=90.0)
        self.of = Coordinator(JobKeys.derive(SECRET), Observers(), lambda world: None, timing)
        self.of.link_type = Counting
        # Who is only slow is not given up: a machine may stand still for longer than a second.
        self.of.relays.fan_out, self.of.relays.patience = fan_out, 60.0
        self.cycle = SnapshotCycle(incarnation, {f"dp{n}": n for n in NAMES}, (), Schedule(1))
        Counting.asked.clear()
        Counting.came.clear()
        self.sealed: list[str] = []
        self.of.listeners.append(self._note)

    def _note(self, event: m.Event) -> None:
        if isinstance(event.body, m.Sealed):
            self.sealed.append(event.node)

    async def begin(self, smps: list[SmpNode]) -> None:
        for name, node in zip(NAMES, smps, strict=True):
            self.of.connect(name, await node.endpoint())
        assert not (await admit(self.of, self.incarnation, NAMES)).lost
        requests = {n: create(f"dp{n}", self.incarnation) for n in NAMES}
        await self.of.ask_all({n: m.Adopt(self.incarnation, (), None) for n in NAMES})
        await self.of.ask_all(requests)
        self.of.cycle = self.cycle
        await self.of.refresh()

    async def close(self) -> None:
        """The next coordinator waits for the leases of this one, unless they end now."""
        ends = (link.ask(m.Lease(self.incarnation, 0.0, link.clock), 30) for link in self.links)
        await asyncio.gather(*ends)
        await self.of.close()

    @property
    def links(self) -> list[SmpLink]:
        return list(self.of.links.values())

    def permit(self) -> None:
        self.of._perform(self.cycle, self.cycle.propose(1, ""))

    async def give_up(self) -> None:
        self.of._perform(self.cycle, self.cycle.give_up("the test says so"))
        await until(lambda: self.cycle.phase == Phase.IDLE, "an answer of everybody")


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


def test_one_request_reaches_all(smps: list[SmpNode]) -> None:
    async def story() -> None:
        chain = Chain(1)
        await chain.begin(smps)
        Counting.asked.clear()
        chain.permit()
        await until_all(smps, SlotState.CAPTURING)
        await chain.give_up()
        direct = {what for what in Counting.asked if what[1] != "Lease"}
        assert direct == {("n0", "PassOn")} and Counting.asked["n0", "PassOn"] == 2
        assert all(set(states(node)) == {SlotState.FREE} for node in smps)
        await chain.close()

    run(story())


def test_below_a_relay_that_hangs_all_are_asked_directly(
    smps: list[SmpNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of everything once it wakes up, late and twice, and nothing comes of it."""

    async def story() -> None:
        chain = Chain(2)
        await chain.begin(smps)
        relay = smps[1].process
        assert relay is not None
        os.kill(relay.pid, signal.SIGSTOP)
        # The relay above gives it up long before it could be given up itself.
        chain.of.relays.patience = 30.0
        monkeypatch.setattr(tree, "LESS_PATIENCE", 0.03)
        try:
            chain.permit()
            await until_all([smps[0], smps[2], smps[3]], SlotState.CAPTURING)
            assert ("n3", "Grant") in Counting.asked and ("n0", "Grant") not in Counting.asked
            chain.of._perform(chain.cycle, chain.cycle.give_up("the test says so"))
            await until(lambda: chain.cycle._waiting == {"n1"}, "answer of the others")
            assert not chain.of.silent.is_set()
        finally:
            os.kill(relay.pid, signal.SIGCONT)
        await until(lambda: chain.cycle.phase == Phase.IDLE, "answer of the one that woke up")
        assert all(set(states(node)) == {SlotState.FREE} for node in smps)
        chain.permit()
        await until_all(smps, SlotState.CAPTURING)
        await chain.give_up()
        await chain.close()

    run(story())


def test_reports_of_all_come_as_one_message(smps: list[SmpNode]) -> None:
    async def story() -> None:
        chain = Chain(3, heartbeat=5.0)  # so that nothing is sent directly because it is late
        await chain.begin(smps)
        chain.permit()
        await until_all(smps, SlotState.CAPTURING)
        Counting.came.clear()
        await seal_on(smps)
        await until(lambda: len(chain.sealed) == len(NAMES), "report of everybody")
        assert {(node, kind) for node, kind, _ in Counting.came} == {("n0", "Gathered")}
        assert sorted(node for _, _, of in Counting.came for node in of) == list(NAMES)
        await until(lambda: chain.cycle.phase == Phase.IDLE, "commit")
        assert [link.inbox.number for link in chain.links] == [1] * 4
        await chain.close()

    run(story())


def test_reports_that_hang_in_a_relay_come_directly_and_once(smps: list[SmpNode]) -> None:
    """It brings them as well once it wakes up."""

    async def story() -> None:
        chain = Chain(4)
        await chain.begin(smps)
        chain.permit()
        await until_all(smps, SlotState.CAPTURING)
        relay = smps[1].process
        assert relay is not None
        os.kill(relay.pid, signal.SIGSTOP)
        try:
            Counting.came.clear()
            await seal_on([smps[0], smps[2], smps[3]])
            await until(lambda: len(chain.sealed) == 3, "report past the relay")
            assert {("n2", "Event", ("n2",)), ("n3", "Event", ("n3",))} <= set(Counting.came)
            assert ("n0", "Gathered", ("n0",)) in Counting.came
        finally:
            os.kill(relay.pid, signal.SIGCONT)
        late = lambda: any({"n2", "n3"} & set(of) for _, k, of in Counting.came if k != "Event")  # noqa: E731
        await until(late, "report through the relay that woke up")
        assert sorted(chain.sealed) == ["n0", "n2", "n3"]
        await seal_on([smps[1]])
        await until(lambda: chain.cycle.phase == Phase.IDLE, "commit")
        assert sorted(chain.sealed) == list(NAMES)
        await chain.close()

    run(story())


def test_what_a_connection_that_broke_has_lost_is_told_again(smps: list[SmpNode]) -> None:
    """Nobody else would say it: the snapshot would never end, and no other would begin."""

    async def story() -> None:
        chain = Chain(5, fan_out=len(NAMES))
        await chain.begin(smps)
        chain.permit()
        await until_all(smps, SlotState.CAPTURING)
        link = chain.of.links["n1"]
        link._socket.disconnect(link.endpoint)
        await seal_on(smps)
        await until_all(smps, SlotState.SEALED)
        assert "n1" not in chain.sealed
        link._socket.connect(link.endpoint)
        await until(lambda: chain.cycle.phase == Phase.IDLE, "commit")
        assert sorted(chain.sealed) == list(NAMES)
        await chain.close()

    run(story())


def test_words_of_an_smp_that_is_connected_anew_are_those_that_follow(smps: list[SmpNode]) -> None:
    """Somebody took it for dead."""

    async def story() -> None:
        chain = Chain(7, fan_out=len(NAMES))
        await chain.begin(smps)
        for node in ("n0", "n1"):
            chain.permit()
            await until_all(smps, SlotState.CAPTURING)
            await seal_on(smps)
            await until(lambda: chain.cycle.phase == Phase.IDLE, "commit")
            await chain.of.refresh()  # so that it keeps nothing of what it has told
            chain.of.connect(node, chain.of.links[node].endpoint)
        assert chain.of.committed == (SnapshotId(7, 2), 2, "local")
        await chain.close()

    run(story())


def test_a_relay_passes_on_nothing_else(smps: list[SmpNode]) -> None:
    async def story() -> None:
        chain = Chain(8)
        await chain.begin(smps)
        link = chain.of.links["n0"]

        async def passed(node: str, incarnation: int, request: m.Message) -> str:
            message = m.PassOn(incarnation, node, m.encode(request), (), 1.0)
            answer = await link.ask(message, 30)
            assert isinstance(answer, m.Refused), answer
            return f"{answer.error}: {answer.reason}"

        abort = m.Abort(8, chain.cycle.snapshot, "")
        assert "this is n0, not n1" in await passed("n1", 8, abort)
        assert "StaleIncarnationError" in await passed("n0", 2, abort)
        assert "Retire is not passed on" in await passed("n0", 8, m.Retire(8, True))
        assert "Lease is not passed on" in await passed("n0", 8, m.Lease(8, 60.0))
        await chain.close()

    run(story())
