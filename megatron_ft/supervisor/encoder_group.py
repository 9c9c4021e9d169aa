"""The disposable group of encoders: kept over the active nodes, a new one whenever it ends."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.supervisor.encoder_processes import EncoderProcesses
from megatron_ft.supervisor.expected_encoders import ExpectedEncoders
from megatron_ft.supervisor.fleet import Fleet

LOOK_SECONDS = 0.02
PREPARE_SECONDS = 10.0
"""Longest wait for a world that is started ahead."""

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0

_NUMBER = re.compile(r"\b\d+\b")
"""Process numbers and counts make no cause another one."""


class EncoderGroup:
    """Starts encoders over the active nodes, and new ones whenever they end: a *world* each time.

    ``expected`` learns which world to expect.  One that cannot be started degrades protection,
    visibly, and stops nothing.
    """

    def __init__(
        self, processes: EncoderProcesses, expected: ExpectedEncoders, fleet: Fleet
    ) -> None:
        self.processes, self._expected, self._fleet = processes, expected, fleet
        self._task: asyncio.Task[None] | None = None
        self._emitted = ""

    @property
    def wanted(self) -> bool:
        """True while a world is being kept."""
        return self._task is not None

    def start(self, nodes: Sequence[str]) -> None:
        """Keep a world over ``nodes`` from now on.  Raises if the first cannot be started."""
        self._emitted = ""
        if not self.processes.take_ahead(nodes, self._fleet.incarnation):
            self.stop()
            self._launch(nodes)
        self._expected.expect_ahead("")
        self._task = asyncio.create_task(self._keep(nodes))

    async def prepare(self, nodes: Sequence[str]) -> None:
        """Start a world for the next incarnation now; returns when it is up, or in vain.

        Its encoders wait to be admitted, and have no arena before.  The present world works on.
        ``start`` for these nodes takes it.
        """
        try:
            name = self.processes.start_ahead(nodes, self._fleet.incarnation + 1)
        except (MegatronFTError, OSError) as error:
            self._emit("world_refused", f"no encoder world was started ahead: {error}")
            return
        self._expected.expect_ahead(name)
        deadline = time.monotonic() + PREPARE_SECONDS
        while self._expected.ahead_on < set(nodes) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)

    def drop_prepared(self) -> None:
        """End the world of ``prepare``; another one is started when it is needed."""
        self.processes.drop_ahead()
        self._expected.expect_ahead("")

    def stop(self) -> None:
        """End the world; no other is started.  One that was prepared is expected from now on."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.processes.kill()
        self._expected.lost()
        if ahead := self.processes.ahead:
            self._expected.expect(ahead.name, ahead.nodes)

    def _launch(self, nodes: Sequence[str]) -> None:
        name = self.processes.start(nodes, self._fleet.incarnation)
        self._expected.expect(name, tuple(nodes))

    async def _keep(self, nodes: Sequence[str]) -> None:
        delay = FIRST_DELAY_SECONDS
        while True:
            begun = time.monotonic()
            status = await self._until_over()
            if time.monotonic() - begun > LONGEST_DELAY_SECONDS:
                # It did its work: one that broke days ago proves nothing about the next.
                delay = FIRST_DELAY_SECONDS
            self._expected.lost()
            self._explain(status)
            started = False
            while not started:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
                started = self._try(nodes)

    async def _until_over(self) -> int:
        """Wait until the world is gone, and end it if it is not up in time; its exit status.

        A start may hang: mpirun's, for one.
        """
        up = asyncio.create_task(self._expected.ready())
        ended = asyncio.create_task(self.processes.ended())
        try:
            await asyncio.wait({up, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and (error := up.exception()) is not None:
                self._expected.end(self.processes.name, str(error))
            return await ended
        finally:
            up.cancel()
            ended.cancel()

    def _try(self, nodes: Sequence[str]) -> bool:
        try:
            self._launch(nodes)
        except (MegatronFTError, OSError) as error:
            self._emit("world_refused", f"no encoder world, snapshots stay local: {error}")
            return False
        return True

    def _explain(self, status: int) -> None:
        """Emit why the world ended; of worlds that never were up each cause only once."""
        why = self._expected.refused or self.processes.why_ended(status)
        if self._expected.joined:
            self._emitted = ""
        text = f"the encoder world ended: {why}; a new one is started"
        self._emit("world_ended", text)

    def _emit(self, kind: str, text: str) -> None:
        """Emit this unless it was the last event and no world was up since."""
        alike = _NUMBER.sub("0", text)
        if alike != self._emitted:
            self._emitted = alike
            self._fleet.observers.emit(kind, text)
