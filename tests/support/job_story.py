"""Events of a job as they are recorded, made up: training, faults and recoveries."""

from __future__ import annotations

from typing import Any

from megatron_ft.supervisor.event_log import LoggedEvent, event_of

HOSTILE = "<script>alert(1)</script><img src=http://192.0.2.1/x.png onerror=alert(2)>\"'&\x00\ud800"
"""Text that a trainer's log may have, and that must stay text."""


class JobStory:
    """Writes down what happens to a job; each call takes the time that it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.incarnation, self.iteration = 0.0, 0, 0
        self.add(0, "supervising", "gpt: 4 nodes, 1 spares, 4 ranks")
        self.begin()

    @property
    def logged(self) -> list[LoggedEvent]:
        """The events as a reader of the file has them."""
        return [event_of(line) for line in self.events]

    def add(self, seconds: float, kind: str, text: str = "", **fields: Any) -> None:
        self.now += seconds
        line = {"time": 1.795e9 + self.now, "at": 50 + self.now, "job": "one", "kind": kind}
        line |= {"text": text or kind, "incarnation": self.incarnation, **fields}
        self.events.append(line)

    def begin(self) -> None:
        self.incarnation += 1
        self.add(1, "trainers_started", in_process=[])
        self.add(3, "training", iteration=self.iteration)

    def train(self, iterations: int) -> None:
        """One second each; every second one is committed, and every fourth protected."""
        for _ in range(iterations):
            self.iteration += 1
            self.now += 1
            if self.iteration % 2 == 0:
                level = "local" if self.iteration % 4 else "protected"
                self.add(0, "committed", iteration=self.iteration, level=level, stall=0.01)

    def lose(self, text: str = "n1 is lost", node: str = "n1") -> None:
        """A node is lost, and training continues behind the newest protected iteration."""
        reached, restored = self.iteration, self.iteration // 4 * 4
        fields: dict[str, Any] = {"cause": "a node was lost", "node": node, "asked": False}
        self.add(0.5, "incarnation_ended", text, **fields, reached=reached, ago=0.5)
        lost = {
            "iteration": restored,
            "source": "parity",
            "iterations_lost": reached - restored,
        }
        self.add(1, "restoring", "", **lost)
        self.iteration = restored
        self.begin()
        parts = {
            "detect": 0.5,
            "kill": 0.2,
            "decide": 0.8,
            "rebuild": 1.5,
            "start": 2.5,
        }
        self.add(1, "recovered", "", total=6.5, **parts, iterate=1.0)
        self.add(reached - restored, "caught_up", iteration=reached, ago=0.0)
