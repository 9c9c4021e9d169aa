"""How long recoveries take, in parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.supervisor.watch.board import Heard


@dataclass(frozen=True)
class RecoveryTime:
    """Seconds of one recovery; of what ranks do, those of the slowest rank for each part.

    ``detect``: from the last sign of progress (hang) or of the node (silence); the kernel tells of
    the end of a process at once.  ``kill``: until all trainers are dead.  ``decide``: until
    new ones are started: fencing, the decision, rebuilding or loading, waiting after repeated
    failures.  ``launch``: until a process is there.  ``imports``: until this package is
    imported, beside the framework.  ``communicators``: ``init_process_group``.  ``set_up``: the
    rest up to the restore: building the model, mostly.  ``restore``: copying the shard in.
    ``first_iteration``: up to its end, waiting for all ranks and arenas included.  ``total``:
    from the fault to the end of the first iteration of the last rank.
    """

    cause: str
    detect: float
    kill: float
    decide: float
    launch: float
    imports: float
    communicators: float
    set_up: float
    restore: float
    first_iteration: float
    total: float

    def parts(self) -> dict[str, float]:
        """The parts by name, in their order in time."""
        return {n: round(v, 3) for n, v in asdict(self).items() if n not in ("cause", "total")}

    def describe(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.parts().items())
        return f"training again {self.total:.2f} s after {self.cause}: {parts}"


class RecoveryClock:
    """Notes when an incarnation ended, its trainers were dead and new ones were started.

    Of what happens on nodes only durations are used: clocks of two nodes are never compared.
    """

    def __init__(self) -> None:
        self.done: list[RecoveryTime] = []
        self._cause = ""
        self._detect = 0.0
        self._failed = self._dead = self._started = 0.0
        self._waiting = self._down = False

    def detected(self, seconds: float) -> None:
        """What ends this incarnation has gone on for so long already."""
        self._detect = seconds

    def failed(self) -> None:
        """An incarnation has ended; one that started no trainers belongs to the same recovery."""
        if not self._down:
            self._failed, self._waiting = time.monotonic(), False

    def dead(self, cause: str) -> None:
        """Its trainers are dead."""
        if not self._down:
            self._dead, self._cause, self._down = time.monotonic(), cause, True

    def starting(self) -> None:
        """Trainers of a new incarnation are about to be started."""
        self._started, self._waiting = time.monotonic(), bool(self._cause)
        self._down = False

    def look(self, heard: Sequence[Heard]) -> RecoveryTime | None:
        """The recovery that has just come to its end, told once."""
        reports = [one.report for one in heard]
        if not self._waiting or not reports or not all(r.first_iteration for r in reports):
            return None
        self._waiting = False
        began = [one.at - one.report.age for one in heard]
        ends = [
            start + r.imports + r.communicators + r.set_up + r.restore + r.first_iteration
            for start, r in zip(began, reports, strict=True)
        ]
        recovery = RecoveryTime(
            cause=self._cause,
            detect=self._detect,
            kill=self._dead - self._failed,
            decide=self._started - self._dead,
            launch=max(0.0, max(began) - self._started),
            imports=max(r.imports for r in reports),
            communicators=max(r.communicators for r in reports),
            set_up=max(r.set_up for r in reports),
            restore=max(r.restore for r in reports),
            first_iteration=max(r.first_iteration for r in reports),
            total=max(ends) - self._failed + self._detect,
        )
        self.done.append(recovery)
        self._cause, self._detect = "", 0.0
        return recovery

    def view(self) -> list[dict[str, Any]]:
        """For ``megatron-ft status --json``: the last ones."""
        return [{"cause": r.cause, "total": round(r.total, 3), **r.parts()} for r in self.done[-5:]]
