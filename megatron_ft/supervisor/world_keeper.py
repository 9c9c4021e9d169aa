"""Keeps an encoder world running for as long as one is wanted."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.processes import EncoderWorld

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0

_NUMBER = re.compile(r"\b\d+\b")
"""Process numbers and counts make no cause another one."""


class WorldKeeper:
    """Starts a world over the active nodes, and a new one whenever it ends.

    That a world cannot be started degrades protection, visibly, and stops nothing.
    """

    def __init__(self, encoders: EncoderWorld) -> None:
        self.encoders = encoders
        self._coordinator: Coordinator
        self._task: asyncio.Task[None] | None = None
        self._said = ""

    def serve(self, coordinator: Coordinator) -> None:
        """Tell ``coordinator`` which world to expect."""
        self._coordinator = coordinator

    @property
    def wanted(self) -> bool:
        """Whether a world is being kept."""
        return self._task is not None

    def start(self, nodes: Sequence[str]) -> None:
        """Keep a world over ``nodes`` from now on.  Raises if the first cannot be started."""
        self.stop()
        self._said = ""
        self._launch(nodes)
        self._task = asyncio.create_task(self._keep(nodes))

    def stop(self) -> None:
        """End the world; no other is started."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.encoders.kill()
        self._coordinator.world_lost()

    def end_world(self, world: str) -> None:
        """End this world if it is the present one; the next follows."""
        if world == self.encoders.name:
            self.encoders.end()

    def _launch(self, nodes: Sequence[str]) -> None:
        name = self.encoders.start(nodes, self._coordinator.incarnation)
        self._coordinator.expect_world(name, tuple(nodes))

    async def _keep(self, nodes: Sequence[str]) -> None:
        delay = FIRST_DELAY_SECONDS
        while True:
            begun = time.monotonic()
            status = await self.encoders.ended()
            if time.monotonic() - begun > LONGEST_DELAY_SECONDS:
                # It did its work: that an earlier one broke days ago says nothing of the next.
                delay = FIRST_DELAY_SECONDS
            self._coordinator.world_lost()
            self._explain(status)
            started = False
            while not started:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
                started = self._try(nodes)

    def _try(self, nodes: Sequence[str]) -> bool:
        try:
            self._launch(nodes)
        except (MegatronFTError, OSError) as error:
            self._tell("world_refused", f"no encoder world, snapshots stay local: {error}")
            return False
        return True

    def _explain(self, status: int) -> None:
        """Tell why the world ended; of worlds that never were up each cause only once."""
        why = self._coordinator.world_refused or self.encoders.why_ended(status)
        if self._coordinator.world_joined:
            self._said = ""
        text = f"the encoder world ended: {why}; a new one is started"
        self._tell("world_ended", text)

    def _tell(self, kind: str, text: str) -> None:
        """Tell this unless it was the last that was told and no world was up since."""
        alike = _NUMBER.sub("0", text)
        if alike != self._said:
            self._said = alike
            self._coordinator.observers.tell(kind, text)
