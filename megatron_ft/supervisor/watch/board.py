"""What the supervisor knows of all trainers' progress, and how old that is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.rpc.node_messages import PulseReport


@dataclass(frozen=True)
class Heard:
    """One rank's last report, and when it came by the supervisor's monotonic clock."""

    shard: str
    node: str
    at: float
    report: PulseReport

    def idle(self, now: float) -> float:
        """Seconds since the rank's last mark, if it has passed none since the report."""
        return self.report.idle + now - self.at


class PulseBoard:
    """The newest report of each shard in the present incarnation."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}

    def note(self, node: str, reports: Mapping[str, PulseReport]) -> None:
        """A node has answered."""
        now = time.monotonic()
        for shard, report in reports.items():
            self._heard[shard] = Heard(shard, node, now, report)

    def begin_incarnation(self) -> None:
        """What was heard is of trainers that are dead now."""
        self._heard.clear()

    def all(self) -> list[Heard]:
        """The newest report of each rank, by rank."""
        return sorted(self._heard.values(), key=lambda heard: heard.report.rank)

    def fresh(self, ranks: int, age: float) -> list[Heard]:
        """Reports of all ranks if none is older than ``age`` seconds, else an empty list.

        A node that is silent, or a supervisor that was suspended, says nothing of progress.
        """
        since = time.monotonic() - age
        heard = self.all()
        whole = len(heard) == ranks and all(one.at >= since for one in heard)
        return heard if whole else []
