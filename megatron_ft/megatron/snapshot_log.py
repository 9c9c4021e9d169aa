"""Snapshots in Megatron's own logs: TensorBoard, W&B, and one line of text an interval.

Everything comes from this rank's counters, which outcomes reach through the SMP: no
collective, no request, no wait.  As Megatron's own figures, they are written by the last
rank; a snapshot is taken by all ranks or by none, but stall and bytes are that rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from megatron_ft.trainer.stats import TAG, CaptureStats, Figure, figures

log = logging.getLogger(__name__)


def text_line(iteration: int, last_iteration: int, shown: list[Figure], now: datetime) -> str:
    """The line of text, in the form of Megatron's."""
    line = f" [{now:%Y-%m-%d %H:%M:%S.%f}] in-memory snapshots at iteration"
    line += f" {iteration:8d}/{last_iteration:8d} |"
    return line + "".join(f" {f.words}: {f.value:{f.form}} |" for f in shown)


class SnapshotLog:
    """Logs one rank's counters where and as often as Megatron logs its own.

    Text every ``--log-interval`` iterations, on the last rank, if anything has changed;
    scalars every ``--tensorboard-log-interval`` iterations to the writers that are on.
    The first error ends the logging of snapshots with a warning, never training.
    """

    def __init__(self, args: Any, stats: CaptureStats) -> None:
        self._stats = stats
        self._is_last_rank = args.rank == args.world_size - 1
        self._iterations = getattr(args, "train_iters", None) or 0
        self._text_interval = getattr(args, "log_interval", 100)
        self._scalar_interval = getattr(args, "tensorboard_log_interval", 1)
        self._shown: list[Figure] = []

    def end_iteration(self, iteration: int) -> None:
        """Log what is due after ``iteration``."""
        if not self._is_last_rank:
            return
        try:
            self._log(iteration)
        except Exception:
            self._is_last_rank = False
            log.warning("snapshots are no longer logged; training continues", exc_info=True)

    def _log(self, iteration: int) -> None:
        text_is_due = iteration % self._text_interval == 0
        scalars_are_due = iteration % self._scalar_interval == 0
        if not (text_is_due or scalars_are_due):
            return
        current = figures(self._stats)
        if scalars_are_due:
            _write({TAG + figure.name: figure.value for figure in current}, iteration)
        if text_is_due and current != self._shown:
            self._shown = current
            print(text_line(iteration, self._iterations, current, datetime.now()), flush=True)


def _write(scalars: Mapping[str, float], iteration: int) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(dict(scalars), iteration)
