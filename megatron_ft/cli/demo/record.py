"""What happened while the protected run went on, as noted at the time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron_ft.cli.demo.scenario import Fault
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import JobEvent


@dataclass(frozen=True)
class Strike:
    """One fault as it was carried out.  ``during`` is the iteration under way.

    ``victim`` names who was hit in few words, ``text`` is the sentence about it.
    """

    fault: Fault
    victim: str
    text: str
    incarnation: int
    during: int
    monotonic: float
    wall: float


@dataclass(frozen=True)
class Seen:
    """An event of the supervisor and the incarnation in which it was told."""

    event: JobEvent
    incarnation: int


@dataclass
class Record:
    """Everything noted while the protected run went on."""

    strikes: list[Strike] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    costs: list[m.CaptureCost] = field(default_factory=list)
    restored: list[tuple[int, m.Restored]] = field(default_factory=list)
    rebuilt: list[tuple[int, m.Rebuilt]] = field(default_factory=list)
    tensor_bytes: dict[str, int] = field(default_factory=dict)

    def note(self, event: JobEvent, incarnation: int) -> None:
        """An event of the supervisor, as it is told."""
        self.seen.append(Seen(event, incarnation))

    def hear(self, event: m.Event) -> None:
        """A message from an SMP; a listener of the coordinator."""
        body = event.body
        if isinstance(body, m.CaptureCost):
            self.costs.append(body)
        elif isinstance(body, m.Restored):
            self.restored.append((event.incarnation, body))
        elif isinstance(body, m.Rebuilt):
            self.rebuilt.append((event.incarnation, body))
        elif isinstance(body, m.Sealed):
            self.tensor_bytes[body.record.shard_id] = body.record.tensor_bytes

    def count(self, kind: str, **fields: object) -> int:
        """How many events of a kind there were with these fields."""
        wanted = fields.items()
        return sum(s.event.kind == kind and wanted <= s.event.fields.items() for s in self.seen)


def now() -> tuple[float, float]:
    """Monotonic and wall time of one moment."""
    return time.monotonic(), time.time()
