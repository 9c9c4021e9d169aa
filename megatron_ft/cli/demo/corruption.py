"""The demo's broken memory: on one node a bit of a weight is wrong, and nothing reports it.

The trainer there flips the bit at the end of each iteration, from one iteration on, as a memory
cell would that keeps its value.  It ends when the node's ranks are elsewhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_ft.core.environment import NODE
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import ReplicasDifferEvent, RestoringEvent

VARIABLE = "MEGATRON_FT_DEMO_BROKEN"
_WINDOW = (0.3, 0.5)
_BIT = 3
"""It changes a bf16 weight by a sixteenth at most, which no loss shows."""


class BrokenMemory(NamedTuple):
    """A node with a broken cell, and the iteration at whose end it breaks."""

    node: str
    iteration: int

    @property
    def variables(self) -> dict[str, str]:
        """The environment by which trainers know of it."""
        return {VARIABLE: f"{self.node} {self.iteration}"}


def plan_corruption(seed: int, iterations: int, nodes: Sequence[str]) -> BrokenMemory:
    chance = random.Random(f"megatron-ft demo corruption {seed}")
    low, high = (round(share * iterations) for share in _WINDOW)
    return BrokenMemory(chance.choice(nodes), chance.randint(low, high))


def corrupt(model: Sequence[Any], iteration: int) -> None:
    """In a trainer, at an iteration's end: flip the bit if this node's memory is broken."""
    node, _, first = os.environ.get(VARIABLE, "").partition(" ")
    if not node or node != os.environ.get(NODE) or iteration < int(first):
        return
    import torch

    weight = next(iter(model[0].parameters())).detach()
    weight.view(-1).view(torch.uint8)[0] ^= 1 << _BIT


def undone(broken: BrokenMemory, events: Sequence[LoggedEvent]) -> list[str]:
    """The job's answer to a broken memory, as lines; none unless it was found, the node alone was
    blamed, and training resumed from before.
    """
    known = [(number, event.facts) for number, event in enumerate(events)]
    differ = next(((n, one) for n, one in known if isinstance(one, ReplicasDifferEvent)), None)
    if differ is None:
        return []
    number, found = differ
    back = next((one for _, one in known[number:] if isinstance(one, RestoringEvent)), None)
    if found.nodes != [broken.node] or back is None:
        return []
    back_to = back.iteration
    if not back_to < broken.iteration <= found.iteration:
        return []
    moves = (event.text for event in events[number:] if event.kind == "spare")
    moved = next(moves, "no spare took over")
    return [
        f"CORRUPTED on purpose: on {broken.node} a bit of a weight was wrong from the end of "
        f"iteration {broken.iteration} on.",
        f"  Found at iteration {found.iteration}: the snapshot was not committed.  On "
        f"{broken.node} alone {found.tensors} was unlike its replicas.",
        f"  Undone: training resumed from iteration {back_to}; {moved}.",
    ]
