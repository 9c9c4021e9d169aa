"""How long snapshots go without parity when encoder worlds end again and again, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.rpc import messages as m
from megatron_ft.supervisor import encoder_group, expected_encoders
from megatron_ft.supervisor.encoder_group import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    EncoderGroup,
)
from megatron_ft.supervisor.events import Observers
from tests.support.pumps import pump


class Worlds:
    """Worlds that live for so many seconds each, and a clock that nobody waits for."""

    def __init__(self, incarnations: Sequence[float]) -> None:
        self.now, self.waited = 0.0, list[float]()
        self._incarnations = list(incarnations)
        self.over = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds

    def start(self, nodes: Sequence[str], incarnation: int) -> str:
        return "world"

    ahead = None

    def take_ahead(self, nodes: Sequence[str], incarnation: int) -> bool:
        return False

    async def ended(self) -> int:
        if not self._incarnations:
            self.over.set()
            await asyncio.Future()
        self.now += self._incarnations.pop(0)
        return 1

    def why_ended(self, status: int) -> str:
        return f"exit status {status}"

    def end(self, name: str) -> None:
        pass

    def kill(self) -> None:
        pass


def delays(incarnations: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    async def story() -> list[float]:
        worlds: Any = Worlds(incarnations)
        # Not in the module time itself: the event loop reads that clock, too.
        clock = SimpleNamespace(monotonic=worlds.monotonic)
        monkeypatch.setattr(encoder_group, "time", clock)
        monkeypatch.setattr(encoder_group.asyncio, "sleep", worlds.sleep)
        of = pump(kill=worlds.end)
        keeper = EncoderGroup(worlds, of.encoders, of.fleet)
        keeper.start(["n0"])
        await worlds.over.wait()
        keeper.stop()
        monkeypatch.undo()
        return list(worlds.waited)

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_worlds_that_break_at_once_are_started_more_and_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = delays([0.1] * 9, monkeypatch)
    assert found == [min(FIRST_DELAY_SECONDS * 2**n, LONGEST_DELAY_SECONDS) for n in range(9)]


def test_a_world_that_has_worked_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a day breaks: the eighth is no reason for half a minute without parity."""
    assert delays([86400.0] * 9, monkeypatch) == [FIRST_DELAY_SECONDS] * 9


def test_a_cause_is_told_once_until_a_world_is_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    full = "[Errno 28] No space left on device: 'writers.json'"

    def step(keeper: EncoderGroup, world: int) -> None:
        """The first five are refused, the sixth joins, and all end."""
        event = m.EncoderRefused("world", f"{full} {world}")
        if world < 5:
            keeper._fleet.take(m.NodeEvent("n0", 0, event))
        elif world == 5:
            keeper._fleet.take(m.NodeEvent("n0", 0, m.EncoderHello(1, "world", 0)))

    async def story() -> None:
        worlds: Any = Worlds([0.1] * 8)
        monkeypatch.setattr(encoder_group.asyncio, "sleep", worlds.sleep)
        observers, count = Observers(), 0
        ended = worlds.ended

        async def until_end() -> int:
            nonlocal count
            step(keeper, count)
            count += 1
            return await ended()  # type: ignore[no-any-return]

        worlds.ended = until_end
        observers.subscribe(lambda event: told.append(f"{event.kind}: {event.text}"))
        of = pump(observers=observers, kill=worlds.end)
        keeper = EncoderGroup(worlds, of.encoders, of.fleet)
        keeper.start(["n0"])
        await worlds.over.wait()
        keeper.stop()
        monkeypatch.undo()

    asyncio.run(asyncio.wait_for(story(), 60))
    ended, new = "world_ended: the encoder world ended:", "a new one is started"
    assert told == [
        f"{ended} the SMP of n0 refused its encoder: {full} 0; {new}",
        f"{ended} exit status 1; {new}",
    ]


def test_a_world_that_is_not_up_in_time_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An mpirun may hang: its process runs, and the encoder of one node never joins."""
    told: list[str] = []

    class Hanging(Worlds):
        killed: asyncio.Event

        def end(self, name: str) -> None:
            told.append(f"end {name}")
            self.killed.set()

        async def ended(self) -> int:
            self.killed = asyncio.Event()
            await self.killed.wait()
            return 9

    async def story() -> None:
        worlds: Any = Hanging([])
        worlds.name = "world"
        monkeypatch.setattr(expected_encoders, "WORLD_TIMEOUT_SECONDS", 0.05)
        monkeypatch.setattr(encoder_group, "FIRST_DELAY_SECONDS", 0.01)
        observers, again = Observers(), asyncio.Event()
        observers.subscribe(lambda event: told.append(f"{event.kind}: {event.text}"))
        of = pump(observers=observers, kill=worlds.end)
        keeper = EncoderGroup(worlds, of.encoders, of.fleet)
        keeper.start(["n0", "n1"])
        of.fleet.take(m.NodeEvent("n1", 0, m.EncoderHello(1, "world", 0)))

        def start(nodes: Sequence[str], incarnation: int) -> str:
            monkeypatch.setattr(expected_encoders, "WORLD_TIMEOUT_SECONDS", 60.0)
            again.set()
            return "world"

        worlds.start = start
        await again.wait()
        for node in ("n0", "n1"):
            of.fleet.take(m.NodeEvent(node, 0, m.EncoderHello(1, "world", 0)))
        await of.encoders.ready()
        assert of.encoders.usable == "world"
        keeper.stop()

    asyncio.run(asyncio.wait_for(story(), 60))
    late = "encoder world world: none from n0 in 0 s"
    assert told == [
        f"world_broken: parity stopped: {late}",
        "end world",
        "world_ended: the encoder world ended: exit status 9; a new one is started",
    ]
