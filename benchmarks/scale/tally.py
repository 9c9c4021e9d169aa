"""Messages and bytes of the control plane at the coordinator, by kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import reported

EVENTS = (m.Sealed, m.CaptureCost, m.Encoded, m.OrderDone)
"""What nodes say by themselves for one snapshot."""


def kind_of(report: m.NodeEvent) -> str:
    """The name of a report: that of the last thing that it tells, which all others waited for."""
    return type(reported(report)[-1].body).__name__


@dataclass
class Tally:
    """Of one snapshot: (messages, bytes) by kind; an answer counts as ``Kind answer``."""

    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    """Processor time of the coordinator, without sockets."""

    def note(self, kind: str, frame: bytes) -> None:
        """One more message, as it is on the wire."""
        count, length = self.kinds.get(kind, (0, 0))
        self.kinds[kind] = count + 1, length + len(frame)

    @property
    def messages(self) -> int:
        """All that the coordinator sends and reads."""
        return sum(count for count, _ in self.kinds.values())

    @property
    def length(self) -> int:
        """Their bytes, before encryption."""
        return sum(length for _, length in self.kinds.values())
