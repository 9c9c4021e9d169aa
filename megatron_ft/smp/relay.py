"""Passing the coordinator's requests on to other SMPs, and their answers back.

A relay is transport and nothing more: the frames are those that the coordinator would send
itself, and what has no answer in time is left out, so that the coordinator asks directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import zmq
import zmq.asyncio

from megatron_ft.errors import ControlPlaneError
from megatron_ft.smp import messages as m
from megatron_ft.smp.request_link import RequestLink
from megatron_ft.smp.security import JobKeys

GatheredCallback = Callable[[m.Gathered], None]


class BranchLink(RequestLink):
    """A connection to an SMP below this one, whose reports ``on_gathered`` takes."""

    on_gathered: GatheredCallback

    def _hear(self, report: m.Event | m.Gathered) -> None:
        if isinstance(report, m.Gathered):
            self.on_gathered(report)


class Relay:
    """Connections of one SMP to those below it, kept from one request to the next."""

    def __init__(
        self, context: zmq.asyncio.Context, keys: JobKeys, on_gathered: GatheredCallback
    ) -> None:
        self._context, self._keys, self._on_gathered = context, keys, on_gathered
        self._links: dict[str, RequestLink] = {}

    async def pass_on(self, request: m.PassOn, own: Awaitable[m.Message]) -> m.Passed:
        """The answers of all below, and our ``own``, which is found meanwhile."""
        self._forget(request.below)
        asked = (self._ask(onward, request.patience) for onward in request.below)
        answer, parts = await asyncio.gather(own, asyncio.gather(*asked))
        return joined(request.node, answer, parts)

    def close(self) -> None:
        """Give all connections up."""
        self._forget(())

    def _forget(self, below: Sequence[m.Onward]) -> None:
        """Close connections to SMPs that are not below us any more."""
        for endpoint in self._links.keys() - {onward.endpoint for onward in below}:
            self._links.pop(endpoint).close()

    async def _ask(self, onward: m.Onward, patience: float) -> m.Passed:
        """The answers of one branch; none at all from one that cannot be reached."""
        try:
            link = self._link(onward)
            answer = await link.ask_frame(onward.frame, m.PassOn.__name__, patience)
        except (ControlPlaneError, zmq.ZMQError):
            self._drop(onward.endpoint)
            return m.Passed((), {})
        return answer if isinstance(answer, m.Passed) else m.Passed((), {})

    def _link(self, onward: m.Onward) -> RequestLink:
        if onward.endpoint not in self._links:
            link = BranchLink(self._context, onward.node, onward.endpoint, self._keys)
            link.on_gathered = self._on_gathered
            self._links[onward.endpoint] = link
        return self._links[onward.endpoint]

    def _drop(self, endpoint: str) -> None:
        """What waits in a connection that does not answer must not arrive later still."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            link.close()


def joined(node: str, answer: m.Message, parts: Sequence[m.Passed]) -> m.Passed:
    """One answer for a node and all branches below it."""
    done = tuple(name for part in parts for name in part.done)
    others = {name: frame for part in parts for name, frame in part.others.items()}
    if isinstance(answer, m.Ok):
        return m.Passed((node, *done), others)
    return m.Passed(done, {**others, node: m.encode(answer)})
