"""The supervisor's part of the watch: hangs, stragglers and the time of recoveries, in one loop."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.config import SnapshotConfig
from megatron_ft.supervisor.watch.hangs import Hang, HangFinder, HangSettings
from megatron_ft.supervisor.watch.peers import StragglerFinder
from megatron_ft.supervisor.watch.recoveries import RecoveryClock

if TYPE_CHECKING:
    from megatron_ft.supervisor.coordinator import Coordinator

log = logging.getLogger(__name__)


class JobWatch:
    """Watches one job over all its incarnations; what it finds is told to the observers.

    ``clock`` measures recoveries.  With ``on_hang`` "report" a hang ends no incarnation.
    """

    def __init__(self, coordinator: Coordinator, settings: SnapshotConfig, log_dir: Path) -> None:
        self.clock = RecoveryClock()
        self._coordinator, self._ranks, self._on_hang = coordinator, 0, settings.on_hang
        hang = HangSettings(
            settings.hang_seconds, settings.hang_factor, first=settings.register_timeout_seconds
        )
        self._hangs = HangFinder(coordinator, hang, log_dir)
        self._stragglers = StragglerFinder(settings.straggler_percent)
        self._reported: list[int] = []
        self._failed = False

    def begin_incarnation(self, ranks: int) -> None:
        """So many trainers are about to be started."""
        self._ranks = ranks
        self._coordinator.pulses.begin_incarnation()
        self._stragglers.begin_incarnation()
        self._reported = []
        self.clock.starting()

    async def until_hang(self) -> Hang:
        """Look at each heartbeat; returns when training hangs and must be restarted."""
        while True:
            await asyncio.sleep(self._coordinator.timing.heartbeat)
            hang = await self._try()
            if hang is not None and self._on_hang == "restart":
                self.clock.detected(hang.idle)
                return hang

    async def _try(self) -> Hang | None:
        """A mistake of ours, or a full disk, must not end a job that trains."""
        try:
            self._look()
            return await self._new_hang()
        except Exception as error:
            if not self._failed:
                self._failed = True
                log.exception("the watch failed")
                self._coordinator.observers.tell("watch_failed", f"hangs may be missed: {error!r}")
            return None

    def _look(self) -> None:
        tell = self._coordinator.observers.tell
        heard = self._coordinator.pulses.fresh(self._ranks, 4 * self._coordinator.timing.heartbeat)
        recovery = self.clock.look(heard)
        if recovery is not None:
            tell("recovered", recovery.describe(), total=recovery.total, **recovery.parts())
        for text in self._stragglers.look(heard):
            tell("straggler", text, ranks=[one.rank for one in self._stragglers.present])
        self._coordinator.watched = {
            "hang_timeout": round(self._hangs.timeout, 3),
            "iteration_seconds": max((one.report.typical for one in heard), default=0.0),
            "stragglers": [
                {"rank": one.rank, "excess": round(one.excess, 4)}
                for one in self._stragglers.present
            ],
            "recoveries": self.clock.view(),
        }

    async def _new_hang(self) -> Hang | None:
        """A hang that was not told yet; one that is only reported is told once."""
        marks = [one.report.marks for one in self._coordinator.pulses.all()]
        if self._reported and marks == self._reported:
            return None
        self._reported = []
        hang = await self._hangs.look(self._ranks, resume=self._on_hang == "restart")
        if hang is not None:
            self._reported = [one.report.marks for one in self._coordinator.pulses.all()]
            self._coordinator.observers.tell(
                "hang", hang.text, ranks=list(hang.blame.ranks), folder=str(hang.folder)
            )
        return hang
