"""How long snapshots go without parity when encoder worlds end again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ft.coordinator.coordinator import Coordinator
from megatron_ft.coordinator.events import Observers
from megatron_ft.coordinator.timing import Timing
from megatron_ft.launch import world_keeper
from megatron_ft.launch.world_keeper import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    WorldKeeper,
)
from megatron_ft.smp.security import JobKeys


class Worlds:
    """Worlds that live for so many seconds each, and a clock that nobody waits for."""

    def __init__(self, lives: Sequence[float]) -> None:
        self.now, self.waited = 0.0, list[float]()
        self._lives = list(lives)
        self.over = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds

    def start(self, nodes: Sequence[str], incarnation: int) -> str:
        return "world"

    async def ended(self) -> int:
        if not self._lives:
            self.over.set()
            await asyncio.Future()
        self.now += self._lives.pop(0)
        return 1

    def kill(self) -> None:
        pass


def delays(lives: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    async def story() -> list[float]:
        worlds: Any = Worlds(lives)
        monkeypatch.setattr(world_keeper.time, "monotonic", worlds.monotonic)
        monkeypatch.setattr(world_keeper.asyncio, "sleep", worlds.sleep)
        keeper = WorldKeeper(worlds)
        keeper.serve(
            Coordinator(JobKeys.derive(bytes(32)), Observers(), keeper.end_world, Timing())
        )
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
