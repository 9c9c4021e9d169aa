"""Who passes a request on to whom.  Pure.

The nodes are split into as many groups as one process should ask, in their order, which
keeps neighbours together.  The first of each group is its relay, and splits the rest again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.smp import messages as m

LESS_PATIENCE = 0.7
"""A relay gives up those below it before it is given up itself, with what it has."""


@dataclass(frozen=True)
class Branch:
    """A node and those that it passes requests on to."""

    node: str
    below: tuple[Branch, ...] = ()

    def nodes(self) -> tuple[str, ...]:
        """All of the branch, the relay first."""
        return (self.node, *(node for branch in self.below for node in branch.nodes()))

    def depth(self) -> int:
        """Connections from the coordinator to the farthest node."""
        return 1 + max((branch.depth() for branch in self.below), default=0)


def branches(nodes: Sequence[str], fan_out: int) -> tuple[Branch, ...]:
    """At most ``fan_out`` branches that hold all nodes, of nearly the same size."""
    count = min(fan_out, len(nodes))
    ends = [len(nodes) * number // count for number in range(count + 1)] if count else [0]
    groups = (nodes[start:end] for start, end in zip(ends, ends[1:], strict=False))
    return tuple(Branch(group[0], branches(group[1:], fan_out)) for group in groups)


def unreached(branch: Branch, found: Collection[str]) -> list[str]:
    """Nodes without an answer, but not those below them: these may never have been asked."""
    if branch.node not in found:
        return [branch.node]
    return [node for below in branch.below for node in unreached(below, found)]


def wrapped(
    branch: Branch,
    incarnation: int,
    requests: Mapping[str, m.Message],
    endpoints: Mapping[str, str],
    patience: float,
) -> m.PassOn:
    """The requests of a whole branch for its relay, whose answer is waited for ``patience`` s."""
    less = patience * LESS_PATIENCE

    def onward(below: Branch) -> m.Onward:
        inner = wrapped(below, incarnation, requests, endpoints, less)
        return m.Onward(below.node, endpoints[below.node], m.encode(inner))

    request = m.encode(requests[branch.node])
    return m.PassOn(incarnation, branch.node, request, tuple(map(onward, branch.below)), less)


def answers(passed: m.Passed) -> dict[str, m.Message]:
    """What each node of a branch has answered; who has not is left out."""
    others: dict[str, m.Message] = {n: m.decode(frame) for n, frame in passed.others.items()}
    return {**dict.fromkeys(passed.done, m.Ok()), **others}
