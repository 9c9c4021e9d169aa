"""Drains that fail, are cut off, hang, or are in the way of a fresher one; steps are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import DrainError
from megatron_ft.core.identity import ShardPlacement, SnapshotId
from megatron_ft.supervisor import drains as module
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.drains import Drains
from megatron_ft.supervisor.events import CommittedEvent, JobEvent, Observers, ReaderStalledEvent
from megatron_ft.supervisor.job_state import DiskPlaces, JobState
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.schedule import Skips
from megatron_ft.supervisor.slot_choice import SlotChoice
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.standing import Standing

WAIT = 20.0
NEVER = 10**6


@dataclass
class Nodes:
    """What drains see of it; ``events`` are what it emits."""

    observers: Observers = field(default_factory=Observers)
    timing: Timing = Timing(heartbeat=0.01)
    incarnation: int = 1
    standing: Standing = field(default_factory=lambda: Standing(DamagedShards(Observers())))
    progress: dict[str, int] = field(default_factory=dict)
    skips: Skips = field(default_factory=Skips)
    hanging: list[str] = field(default_factory=list)
    events: list[JobEvent] = field(default_factory=list)

    async def hold(self, *_: Any) -> None:
        """Pin."""

    async def release(self, *_: Any) -> None:
        """Unpin."""

    async def refresh(self) -> None:
        """Heartbeats."""

    def commit(self, iteration: int) -> None:
        """A newer snapshot."""
        self.standing.commits(SnapshotId(1, iteration), iteration, "protected")
        self.observers.emit(CommittedEvent(), "")

    def kinds(self, kind: str) -> list[JobEvent]:
        """The events of a kind."""
        return [event for event in self.events if event.kind == kind]


class Steps:
    """Writes that end when the test says so; all other steps end at once."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, asyncio.Future[None]]] = []
        self.others: list[str] = []

    async def run(
        self, _: Any, spec: JobSpec, incarnation: int, step: str, plans: Mapping[str, DrainPlan]
    ) -> None:
        """Stands for run_step."""
        if step != "write":
            self.others.append(step)
            return
        (plan,) = plans.values()
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writes.append((plan.iteration, end))
        await end

    async def begun(self, count: int) -> asyncio.Future[None]:
        """The end of write number ``count``, once it has begun."""
        await until(lambda: len(self.writes) >= count, f"write {count} to begin")
        return self.writes[count - 1][1]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(int(WAIT / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited in vain for {what}")


class Launcher:
    """One whose job has ended where a failure says so."""

    def is_over(self, text: str) -> bool:
        """As Launcher's."""
        return "has expired" in text


@dataclass
class World:
    """Drains of a job of one shard."""

    nodes: Nodes
    steps: Steps
    drains: Drains
    lost: list[str]
    slots: SlotChoice = SlotChoice(2, "n1 is small")

    def begin(self) -> None:
        """An incarnation begins."""
        self.drains.begin({"dp0": "n0"}, {"dp0": ShardPlacement("n0", 0, ())}, (), 0)
        self.drains.warn_of_slots(self.slots)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    nodes, steps, lost = Nodes(), Steps(), list[str]()
    nodes.observers.subscribe(nodes.events.append)
    monkeypatch.setattr(module, "run_step", steps.run)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    spec = JobSpec(
        name="j",
        command=("x",),
        nodes=4,
        settings=SnapshotConfig(drain_dir=tmp_path / "disk", drain_interval=NEVER),
        log_dir=tmp_path,
    )
    with JobState(tmp_path / "state", "j") as state:
        # The disk that a step of this test writes to is not looked at.
        monkeypatch.setattr(module, "noted_places", lambda before, spec: DiskPlaces())
        job = SimpleNamespace(
            spec=spec,
            launcher=Launcher(),
            state=state,
            fleet=nodes,
            pump=nodes,
            standing=nodes.standing,
            observers=nodes.observers,
            members=SimpleNamespace(spares_gone=lambda: bool(lost)),
        )
        return World(nodes, steps, Drains(cast(Any, job)), lost)


async def test_an_urgent_drain_that_fails_is_tried_until_one_is_complete(world: World) -> None:
    world.begin()
    world.lost.append("n1")
    world.nodes.commit(7)
    for count in (1, 2, 3):
        (await world.steps.begun(count)).set_exception(DrainError("no space left"))
    (await world.steps.begun(4)).set_result(None)
    await until(lambda: world.nodes.standing.durable is not None, "a complete drain")
    world.nodes.commit(8)
    await asyncio.sleep(0.1)
    await world.drains.abandon()
    assert [iteration for iteration, _ in world.steps.writes] == [7] * 4, "and none after it"
    failed = world.nodes.kinds("drain_failed")
    assert len(failed) == 3 and all("tried again soon, as it is urgent" in e.text for e in failed)


async def test_an_urgent_drain_that_is_cut_off_begins_again_with_the_next_incarnation(
    world: World,
) -> None:
    world.begin()
    world.lost.append("n1")
    world.nodes.commit(7)
    await world.steps.begun(1)
    await world.drains.abandon()
    world.begin()
    world.nodes.commit(9)
    (await world.steps.begun(2)).set_result(None)
    await until(lambda: world.nodes.standing.durable is not None, "a complete drain")
    await world.drains.abandon()
    assert world.steps.writes[1][0] == 9


def test_an_older_drain_does_not_answer_for_what_became_urgent_behind_its_begin(
    world: World,
) -> None:
    """A stop: the newest snapshot is due as well, whether or not the older one was urgent."""

    async def work() -> bool:
        world.begin()
        world.lost.append("n1")
        world.nodes.commit(7)
        older = await world.steps.begun(1)
        world.nodes.commit(9)
        last = asyncio.create_task(world.drains.last(WAIT))
        await asyncio.sleep(0.05)
        older.set_result(None)
        (await world.steps.begun(2)).set_result(None)
        return await last

    assert asyncio.run(work())
    assert [iteration for iteration, _ in world.steps.writes] == [7, 9]


@pytest.mark.parametrize(("slowest", "fresher"), [(0.0, False), (50.0, True), (99.0, False)])
async def test_at_a_stop_the_freshest_snapshot_that_can_be_written_wins(
    world: World, slowest: float, fresher: bool
) -> None:
    """The first drain shows how long one takes; then the older one is in the way, or is not."""
    world.begin()
    world.lost.append("n1")
    world.nodes.commit(7)
    await world.steps.begun(1)
    world.nodes.commit(9)
    world.drains._slowest = slowest
    last = asyncio.create_task(world.drains.last(60.0 if fresher else 0.2))
    if fresher:
        (await world.steps.begun(2)).set_result(None)
        assert await last
    else:
        assert not await last
    await world.drains.abandon()
    assert [iteration for iteration, _ in world.steps.writes] == ([7, 9] if fresher else [7])


async def test_at_a_stop_the_drain_of_the_newest_snapshot_is_not_begun_anew(world: World) -> None:
    """It gives way to fresher ones only, however long it has run."""
    world.begin()
    world.lost.append("n1")
    world.nodes.commit(7)
    end = await world.steps.begun(1)
    world.drains._slowest = 50.0
    last = asyncio.create_task(world.drains.last(60.0))
    await until(lambda: world.drains._ending, "the last drain")
    assert not end.cancelled()
    end.set_result(None)
    assert await last
    await world.drains.abandon()
    assert [iteration for iteration, _ in world.steps.writes] == [7]


def test_a_last_drain_that_fails_is_tried_a_few_times(world: World) -> None:
    async def work() -> bool:
        world.begin()
        world.nodes.commit(7)
        last = asyncio.create_task(world.drains.last(WAIT))
        for count in range(1, 1 + module.MOST_LAST_TRIES):
            (await world.steps.begun(count)).set_exception(DrainError("no space left"))
        return await asyncio.wait_for(last, WAIT / 2)

    assert not asyncio.run(work())
    assert len(world.steps.writes) == module.MOST_LAST_TRIES


def test_a_last_drain_is_not_tried_again_where_the_job_is_over(world: World) -> None:
    """A cancelled Slurm job has a few seconds, in which it says how it ends."""

    async def work() -> bool:
        world.begin()
        world.nodes.commit(7)
        last = asyncio.create_task(world.drains.last(WAIT))
        end = await world.steps.begun(1)
        end.set_exception(DrainError("srun: error: Slurm job 11 has expired"))
        return await asyncio.wait_for(last, WAIT / 2)

    assert not asyncio.run(work())
    assert len(world.steps.writes) == 1
    assert "the job ends" in world.nodes.kinds("drain_failed")[0].text


async def test_no_drain_begins_while_an_older_one_hangs(world: World) -> None:
    world.begin()
    world.lost.append("n1")
    world.nodes.hanging = ["write-3 on n0"]
    world.nodes.commit(7)
    await asyncio.sleep(0.1)
    assert not world.steps.writes and not world.steps.others
    world.nodes.hanging = []
    (await world.steps.begun(1)).set_result(None)
    await world.drains.abandon()


async def test_the_end_of_training_waits_for_no_disk_that_hangs(world: World) -> None:
    """The drain that runs makes no progress, is killed and stays: no other one begins, and the
    folder is not tidied up there."""
    world.begin()
    world.lost.append("n1")
    world.nodes.commit(7)
    await world.steps.begun(1)
    world.nodes.commit(9)
    end = asyncio.create_task(world.drains.settle())
    await asyncio.sleep(0.05)
    emit = world.nodes.observers.emit
    emit(ReaderStalledEvent(reader="verify-17"), "another reader")
    await asyncio.sleep(0.05)
    assert not end.done()
    world.nodes.hanging = ["write-3 on n0"]
    emit(ReaderStalledEvent(reader="write-3"), "it has not run")
    await asyncio.wait_for(end, WAIT / 2)
    (waits,) = world.nodes.kinds("drain_awaited")
    assert "the job ends once iteration 7 is on disk, or" in waits.text
    (failed,) = world.nodes.kinds("drain_failed")
    assert "the job ends, and what was there stays: write has not run for 120 s" in failed.text
    assert len(world.steps.writes) == 1 and world.steps.others == ["clear"]


async def test_the_end_of_training_says_that_nothing_more_is_drained(world: World) -> None:
    world.begin()
    world.nodes.hanging = ["write-3 on n0"]
    world.nodes.commit(7)
    await asyncio.wait_for(world.drains.settle(), WAIT / 2)
    (failed,) = world.nodes.kinds("drain_failed")
    assert failed.text == "nothing more is drained, as the disk hangs: write-3 on n0"


async def test_what_a_failure_during_a_drain_would_have_cost_is_said_once(world: World) -> None:
    world.begin()
    for iteration in (7, 9):
        world.lost[:] = []
        await asyncio.sleep(0.05)
        world.lost.append("n1")
        world.nodes.commit(iteration)
        end = await world.steps.begun(len(world.steps.writes) + 1)
        world.nodes.progress["dp0"] = 30
        for reached in (10, 30):
            world.nodes.skips.begin(reached, 4)
        end.set_result(None)
        await until(lambda: not world.drains._plan_begun, "the end")
    await world.drains.abandon()
    warned, cost = world.nodes.kinds("drain_cost")
    assert "no snapshot is taken while a drain runs" in warned.text and "; n1 is" in warned.text
    assert "would have lost 23 iterations; with --slots 3" in cost.text


async def test_three_slots_need_no_warning(world: World) -> None:
    world.slots = SlotChoice(3)
    world.begin()
    await world.drains.abandon()
    assert not world.nodes.kinds("drain_cost")
