"""Watches the script's first read of what a restore changes: counters, learning rates, schedules.

A script that loads nothing begins ``while engine.global_steps < steps`` with a read.  Were it
restored by its first batch only, it would train a step too many.

A watched object is of a subclass of its class until the watch ends; nothing is slower later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from deepspeed_ext.checkpoint_engine import Agreement
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.trainer.start_choice import supervisor_chose_disk

log = logging.getLogger(__name__)

SECONDS = 10.0
"""Longest wait for the other ranks' reads: a script may read on one rank alone, to print."""

TRIES = 3
"""Reads on some ranks alone that are waited at; then the first batch restores."""

_ENGINE = frozenset(
    ("global_steps", "global_samples", "skipped_steps", "micro_steps", "get_lr", "get_mom")
)
_SCHEDULE = frozenset(("last_epoch", "last_batch_iteration", "get_lr", "get_last_lr", "_last_lr"))
_OWN_PACKAGES = frozenset(("deepspeed", "deepspeed_ext", "megatron_ft", "torch"))
"""Packages whose reads do not count as the script's."""


class CounterReads:
    """Calls ``read`` before the script gets such a value, until ``end``.

    ``read`` gets a function that waits until all ranks have come to a read, and says if they have:
    to be asked before what is collective.
    """

    def __init__(
        self, engine: Any, agreement: Agreement, read: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._agreement, self._read = agreement, read
        self._watched: list[tuple[Any, type]] = []
        self._busy, self._tries = False, TRIES
        if supervisor_chose_disk():
            return  # nothing is offered, so no rank has to wait for others
        self._watch(engine, _ENGINE)
        if getattr(engine, "lr_scheduler", None) is not None:
            self._watch(engine.lr_scheduler, _SCHEDULE)

    def end(self) -> None:
        """Leave the objects as they were; a second call does nothing."""
        for watched, cls in self._watched:
            watched.__class__ = cls
        self._watched.clear()

    def _watch(self, watched: Any, names: frozenset[str]) -> None:
        cls: Any = type(watched)
        before = self._before_read

        def __getattribute__(self: Any, name: str) -> Any:
            if name in names:
                before(sys._getframe(1).f_globals.get("__name__", ""))
            return cls.__getattribute__(self, name)

        own = {"__getattribute__": __getattribute__, "__module__": cls.__module__}
        try:
            watched.__class__ = type(cls.__name__, (cls,), own)
        except TypeError:
            return  # of a class with slots, say: its first batch restores
        self._watched.append((watched, cls))

    def _before_read(self, reader: str) -> None:
        if self._busy or reader.partition(".")[0] in _OWN_PACKAGES:
            return
        self._busy = True
        try:
            self._read(self._all_read)
        finally:
            self._busy = False
            if not self._tries:
                self.end()

    def _all_read(self) -> bool:
        try:
            self._agreement.meet("the script has read a counter of the engine")
        except ControlPlaneError as error:
            self._tries -= 1
            log.warning(
                "a counter of the engine was read before the snapshot was restored, on some ranks "
                "alone, so it is that of a fresh start (%s). Read it on all ranks",
                error,
            )
            return False
        return True
