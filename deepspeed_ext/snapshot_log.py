"""Snapshots in the monitors that DeepSpeed's JSON switches on: TensorBoard, W&B, CSV, Comet.

Everything comes from this rank's counters, which outcomes reach through the SMP: no
collective, no request, no wait.  As DeepSpeed's own figures, they are written by rank 0 over
the number of samples.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_ft.trainer.figures import TAG, figures
from megatron_ft.trainer.stats import CaptureStats

log = logging.getLogger(__name__)


class SnapshotLog:
    """Writes one rank's counters to the engine's monitors whenever they have changed.

    The first error ends the logging of snapshots with a warning, never training.
    """

    def __init__(self, engine: Any, stats: CaptureStats) -> None:
        self._engine, self._stats = engine, stats
        self._on = engine.global_rank == 0 and engine.monitor.enabled
        self._written: dict[str, float] = {}

    def end_step(self) -> None:
        """Write what is new after a step."""
        if not self._on:
            return
        try:
            self._write({TAG + figure.name: figure.value for figure in figures(self._stats)})
        except Exception:
            self._on = False
            log.warning("snapshots are no longer logged; training goes on", exc_info=True)

    def _write(self, values: dict[str, float]) -> None:
        samples = self._engine.global_samples
        new = [(n, v, samples) for n, v in values.items() if self._written.get(n) != v]
        if new:
            self._engine.monitor.write_events(new)
            self._written = values
