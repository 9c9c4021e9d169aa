"""Seconds of SnapshotManager.save() in a program, noted by the program itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megatron_ft.core.frameworks import Function, wrap
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.mapping import State, StateAdapter
from megatron_ft.trainer.state import live_tensors
from megatron_ft.trainer.ticket import Ticket

WARM_UP = 3
"""Captures at the begin that do not count: the first one plans the layout, and each slot is
written for the first time."""


class SaveCalls:
    """The calls in this process that captured, from now on: their seconds in ``seconds``.

    A framework's hooks make them, so it is the method of the class that is timed.
    """

    def __init__(self, captures: int) -> None:
        """``captures``: how many shall count."""
        self.seconds: list[float] = []
        self._captures, self._tensors = captures, 0
        wrap(SnapshotManager, "save", self._timed)

    @property
    def enough(self) -> bool:
        """Whether as many as shall count have been seen."""
        return len(self.seconds) >= WARM_UP + self._captures

    def write(self, out: Path, said: str) -> None:
        """Leave what was found to who started the program, and what it is of in words."""
        note = f"{self._tensors:,} tensors; {said}"
        out.write_text(json.dumps({"note": note, "seconds": self.seconds[WARM_UP:]}))

    def _timed(self, original: Function) -> Function:
        def save(manager: SnapshotManager, iteration: int, state: State) -> Ticket:
            started = time.perf_counter()
            ticket: Ticket = original(manager, iteration, state)
            taken = time.perf_counter() - started
            if not ticket.skipped:
                self._note(taken, state)
            return ticket

        return save

    def _note(self, taken: float, state: State) -> None:
        if not self.seconds:
            self._tensors = len(live_tensors(StateAdapter()(state)))
        self.seconds.append(taken)
