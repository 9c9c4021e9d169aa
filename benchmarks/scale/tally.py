"""Messages and bytes of the control plane at the coordinator, by kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ft.smp import messages as m
from megatron_ft.smp.outbox import reported

EVENTS = (m.Sealed, m.CaptureCost, m.Encoded, m.OrderDone)
"""What nodes say by themselves for one snapshot."""


def told(report: m.Event | m.Gathered) -> list[m.Event]:
    """The events in one message, of whichever nodes they are."""
    if isinstance(report, m.Event):
        return reported(report)
    return [event for frame in report.frames for event in reported(m.decode(frame))]


def kind_of(report: m.Event | m.Gathered) -> str:
    """The name of a report: that of the last thing that it tells, which all others waited for."""
    return type(told(report)[-1].body).__name__


@dataclass
class Tally:
    """Of one snapshot: (messages, bytes) by kind; an answer counts as ``Kind answer``."""

    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, kind: str, message: m.Message) -> None:
        """One more message, as long as it is on the wire."""
        count, length = self.kinds.get(kind, (0, 0))
        self.kinds[kind] = count + 1, length + len(m.encode(message))

    @property
    def messages(self) -> int:
        """All that the coordinator sends and reads."""
        return sum(count for count, _ in self.kinds.values())

    @property
    def length(self) -> int:
        """Their bytes, before encryption."""
        return sum(length for _, length in self.kinds.values())
