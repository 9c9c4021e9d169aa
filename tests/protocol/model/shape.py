"""How large a modelled job is, and how much of what can happen to it happens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.checkpoint.decide import StripeState

Step = tuple[object, ...]
"""Name of a step and its arguments: pids, node names, numbers of incarnations."""


@dataclass(frozen=True)
class Shape:
    """A small job: ``stripes`` of ``data`` + ``parity`` members, one of each on every node.

    ``readers``, ``disk`` and ``damage`` say whether there are readers, drains to disk, and blocks
    that go bad.  A ``coarse`` job takes larger steps: a region is written at once and not in
    two halves, and an SMP carries out all effects of one message before it takes the next.
    With ``resets`` connections are made anew: each request of a snapshot comes once more, at any
    time or never, as does its answer, and what a node has told may be lost.
    With ``survivors`` trainers that live let go of their arenas and train on in the next
    incarnation.
    """

    codec: str
    data: int
    parity: int
    spares: int
    slots: int
    stripes: int = 1
    readers: bool = False
    disk: bool = False
    damage: bool = False
    coarse: bool = False
    resets: bool = False
    survivors: bool = False

    @property
    def halves(self) -> int:
        """Parts in which a region is written."""
        return 1 if self.coarse else 2

    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(self.data + self.parity)]

    def stripe_states(self) -> tuple[StripeState, ...]:
        count = self.data + self.parity
        return tuple(
            StripeState(
                self.codec,
                self.data,
                self.parity,
                64 * self.data,
                tuple(f"dp{s * count + i}" for i in range(count)),
                64,
            )
            for s in range(self.stripes)
        )


@dataclass(frozen=True)
class Bounds:
    """What keeps an exploration finite; without bounds (None) a job runs for ever.

    ``snapshots`` are permitted in each incarnation; ``drains`` and ``readers`` begun in the whole
    job.
    """

    snapshots: int = 2
    drains: int = 1
    readers: int = 1
