"""The coordinator's connections to all SMPs: requests, events, heartbeats and leases."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.core.errors import (
    ArenaMemoryError,
    ControlPlaneError,
    NoRoomError,
    StaleIncarnationError,
)
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.smp.event_sender import EventInbox
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.expected_world import ExpectedWorld
from megatron_ft.supervisor.hanging_drains import HangingDrains
from megatron_ft.supervisor.heartbeats import Heartbeats
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.standing import Standing

log = logging.getLogger(__name__)

ARENA_TIMEOUT_SECONDS = 600.0
"""Limit for making an arena, whose pages are all touched."""

REQUEST_TIMEOUT_SECONDS = 30.0

MOST_NODES = 16384
"""Connections that libzmq provides for; by default it refuses the 1,024th."""


_BEAT_WAITS = 4
"""Heartbeats' intervals that the answer to one is awaited for."""

EventCallback = Callable[[m.NodeEvent], None]


class SmpLink:
    """An authenticated connection to the SMP of ``node``: requests, answers and its events.

    Answers may come in any order, so heartbeats pass a request that takes long.
    ``last_heard`` is the monotonic time of the last frame from there, ``missed`` the number of
    heartbeats since then, ``clock`` the newest time of the node's own clock that a heartbeat has
    brought, 0 before the first.  ``inbox`` is that of an earlier connection to the node, since its
    SMP may be the same.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        node: str,
        endpoint: str,
        keys: JobKeys,
        on_event: EventCallback,
        inbox: EventInbox | None = None,
    ) -> None:
        self.node, self.endpoint = node, endpoint
        self.last_heard, self.missed = time.monotonic(), 0
        self.clock = 0.0
        self.inbox = inbox or EventInbox()
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        keys.connect(self._socket, endpoint)
        self._reader = asyncio.create_task(self._read())

    async def ask(self, request: m.Message, timeout: float) -> Any:
        """The answer to a request, Refused included.  ControlPlaneError after ``timeout`` s."""
        if self._socket.closed:
            raise ControlPlaneError(self._given_up())
        number = str(next(self._numbers)).encode()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._socket.send_multipart([number, m.encode(request)])
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError as error:
            raise ControlPlaneError(
                f"the SMP of node {self.node} ({self.endpoint}) did not answer "
                f"{type(request).__name__} in {timeout:.1f} s"
            ) from error
        finally:
            self._pending.pop(number, None)

    async def demand(self, request: m.Message, timeout: float) -> Any:
        """Like ``ask``, but the error of a Refused is raised."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, m.Refused):
            raise answer.error
        return answer

    async def make_arena(self, request: m.CreateArena) -> None:
        """Have the node make an arena or check the one it has; NoRoomError if it has no room."""
        try:
            await self.demand(request, ARENA_TIMEOUT_SECONDS)
        except ArenaMemoryError as error:
            raise NoRoomError(f"{self.node}: {error}", self.node) from error

    def close(self) -> None:
        """Give the connection up; a pending ``ask`` raises ControlPlaneError.

        Not a cancellation: that would end a caller that asks several nodes, in silence.
        """
        self._reader.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ControlPlaneError(self._given_up()))
        self._socket.close()

    def receive(self, message: m.NodeEvent) -> None:
        """Hand on the new events of one message."""
        for event in self.inbox.take(message):
            self._on_event(event)

    def _given_up(self) -> str:
        return f"the connection to node {self.node} was given up"

    async def _read(self) -> None:
        while True:
            number, frame = await self._socket.recv_multipart()
            self.last_heard, self.missed = time.monotonic(), 0
            try:
                message = m.decode(frame)
            except ControlPlaneError as error:
                log.error("node %s: %s", self.node, error)
                continue
            if isinstance(message, m.NodeEvent):
                self.receive(message)
            elif number in self._pending and not self._pending[number].done():
                self._pending[number].set_result(message)


class Connections(ABC):
    """One connection and one heartbeat for each node; ``encoders`` is the world over them.

    ``kill_world`` ends the encoder world of a name; ``observers`` receive what happens.

    ``silent`` is set when a node is, when this coordinator does not lead any more, and when it
    has failed.
    """

    link_type: type[SmpLink] = SmpLink
    """The class of a connection; a benchmark that counts messages replaces it."""

    def __init__(
        self,
        keys: JobKeys,
        observers: Observers,
        kill_world: Callable[[str], None],
        timing: Timing,
        scrub_percent: float = 0.0,
    ) -> None:
        self.links: dict[str, SmpLink] = {}
        self.incarnation = 0
        self.timing = timing
        self.observers = observers
        self.progress: dict[str, int] = {}
        self.pulses = Heartbeats()
        self.scrub_percent = scrub_percent
        self.silent = asyncio.Event()
        self.failure: BaseException | None = None
        self.rewind_asked = asyncio.Event()
        self.rewind_before = 0
        self.evacuations: dict[str, m.Evacuate] = {}
        """Requests that nobody has answered yet, by their numbers."""
        self._evacuation_asked = asyncio.Event()
        self.standing = Standing(DamagedShards(observers))
        self.missing: dict[str, str] = {}
        """The arena of each node that has no file any more, "" if none, by its last heartbeat."""
        self.arena_missing = asyncio.Event()
        self.hanging_drains = HangingDrains(observers)
        self.encoders = ExpectedWorld(observers, kill_world)
        self._paused_on: set[str] = set()
        self._pinned_on: set[str] = set()
        self.readers: dict[str, tuple[str, ...]] = {}
        """Readers that hold snapshots on each node, as its last heartbeat named them."""
        self._crowded_on: set[str] = set()
        self._unmade_on: set[str] = set()
        self._shortages: dict[str, str] = {}
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_NODES)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._inboxes: dict[str, EventInbox] = {}
        self._superseded = ""
        self._requests_known: set[str] = set()

    @abstractmethod
    def _on_event(self, event: m.NodeEvent) -> None:
        """Handle one event of a node."""

    @property
    def paused(self) -> bool:
        """True if a node was ordered to stop snapshots; one is enough for the whole job."""
        return bool(self._paused_on & self.links.keys())

    @property
    def pinned(self) -> bool:
        """True if some node has no slot for a snapshot but those that readers hold."""
        return bool(self._pinned_on & self.links.keys())

    @property
    def crowded(self) -> bool:
        """True if some node has no slot for a snapshot but that of the last protected one."""
        return bool(self._crowded_on & self.links.keys())

    @property
    def unmade(self) -> bool:
        """True if some node has no slot for a snapshot until further memory is made."""
        return bool(self._unmade_on & self.links.keys())

    def connect(self, node: str, endpoint: str) -> None:
        """Use ``endpoint`` for ``node`` from now on."""
        self.disconnect(node)
        inbox = self._inboxes.setdefault(node, EventInbox())
        link = self.link_type(self._context, node, endpoint, self._keys, self._on_event, inbox)
        self.links[node] = link
        self._keep(self._heartbeat(link))

    def disconnect(self, node: str) -> None:
        """Forget a node that is lost or whose SMP is being replaced."""
        link = self.links.pop(node, None)
        if link is not None:
            link.close()

    async def close(self, *, release: bool = False) -> None:
        """End all tasks and connections; the SMPs stay.

        ``release`` ends the leases, so that the next supervisor need not wait for them.  No
        trainer may run then.
        """
        for task in list(self._tasks):
            task.cancel()
        # An SMP counts a lease from a clock of its own that it has told since it admitted us.
        for seconds in (self.timing.lease, 0.0) if release else ():
            await asyncio.gather(*(self._beat(link, seconds) for link in self.links.values()))
        for node in list(self.links):
            self.disconnect(node)
        self._context.term()

    async def refresh(self, but: Collection[str] = ()) -> None:
        """One round of heartbeats to all nodes but these at once; updates progress."""
        links = [link for link in self.links.values() if link.node not in but]
        await asyncio.gather(*(self._beat(link) for link in links))

    async def _heartbeat(self, link: SmpLink) -> None:
        """Renew one node's lease as long as its link is in use.

        Every node has a task of its own, so that one which does not answer never
        delays the leases of the others.
        """
        while self.links.get(link.node) is link and not self._superseded:
            begun = time.monotonic()
            await self._beat(link)
            link.missed += link.last_heard < begun
            if self.silent_nodes([link.node]):
                self.silent.set()
            await asyncio.sleep(self.timing.heartbeat)

    async def _beat(self, link: SmpLink, seconds: float | None = None) -> None:
        """Renew the lease of a node for so long, by default as usual, and take its news."""
        seconds = self.timing.lease if seconds is None else seconds
        arrived = link.inbox.stream, link.inbox.number
        lease = m.Lease(self.incarnation, seconds, link.clock, self.scrub_percent, *arrived)
        try:
            answer = await link.ask(lease, _BEAT_WAITS * self.timing.heartbeat)
        except ControlPlaneError:
            return
        if lease.incarnation != self.incarnation:
            return
        if isinstance(answer, m.LeaseAnswer):
            link.clock = max(link.clock, answer.clock)
            self.progress.update(answer.progress)
            self.pulses.record(answer.node, answer.pulses)
            self._on_answer(answer)
        elif link.clock and isinstance(answer.error, StaleIncarnationError):
            self.supersede(answer.reason)

    def _on_answer(self, answer: m.LeaseAnswer) -> None:
        if answer.rewind is not None:
            self.rewind_before = answer.rewind
            self.rewind_asked.set()
        for request in answer.evacuations:
            self.ask_evacuation(request)
        before = self.paused
        self.standing.holds(answer.node, answer.held)
        self.readers[answer.node] = answer.readers
        known, self.missing[answer.node] = self.missing.get(answer.node), answer.missing
        if answer.missing and not known:
            self.arena_missing.set()
        for nodes, stated in (
            (self._paused_on, answer.paused),
            (self._pinned_on, answer.pinned),
            (self._crowded_on, answer.crowded),
            (self._unmade_on, answer.unmade),
        ):
            nodes.discard(answer.node)
            nodes |= {answer.node} if stated else set()
        known, self._shortages[answer.node] = self._shortages.get(answer.node), answer.shortage
        if answer.shortage and not known:
            text = f"{answer.node}: {answer.shortage}; no snapshot is taken before there is room"
            self.observers.emit("no_room", text, node=answer.node)
        self.hanging_drains.note(answer.node, answer.hanging)
        if self.paused != before:
            word = "paused" if self.paused else "resumed"
            self.observers.emit(word, f"snapshots {word} by request")

    @property
    def hanging(self) -> list[str]:
        """Drains on connected nodes that were killed and do not end, each with its node."""
        return self.hanging_drains.on(self.links)

    def ask_evacuation(self, request: m.Evacuate) -> None:
        """Take a request, unless it came before: every heartbeat brings it again."""
        if request.number not in self._requests_known:
            self._requests_known.add(request.number)
            self.evacuations[request.number] = request
            self._evacuation_asked.set()

    def supersede(self, reason: str) -> None:
        """Have this supervisor end, as of ``require_lead``: another one leads the job."""
        self._superseded = reason
        self.silent.set()

    def require_lead(self) -> None:
        """StaleIncarnationError when a node that obeyed this coordinator obeys a later
        incarnation."""
        if self._superseded:
            raise StaleIncarnationError(
                f"another supervisor leads this job now: {self._superseded}. This one ends; the "
                "job is the other's"
            )

    def silent_nodes(self, nodes: Iterable[str]) -> list[str]:
        """Those of ``nodes`` that have answered no heartbeat for ``node_timeout``.

        Heartbeats are counted, not seconds: a process that was suspended has sent none, and its
        silence says nothing about the nodes.
        """
        seconds = (1 + _BEAT_WAITS) * self.timing.heartbeat
        links = [self.links[node] for node in nodes if node in self.links]
        return [link.node for link in links if link.missed * seconds >= self.timing.node_timeout]

    async def quiet_nodes(self) -> list[str]:
        """Nodes that do not answer just now; they may be lost, which takes longer to know.

        Ranks elsewhere fail within moments of a node's loss, before it is known here.
        """
        before = time.monotonic()
        await self.refresh()
        return [node for node, link in self.links.items() if link.last_heard < before]

    def begin_incarnation(self, incarnation: int) -> None:
        """Lead ``incarnation`` from now on: events and answers of earlier ones count no more."""
        self.incarnation = incarnation
        self.standing.begin_incarnation()

    def forget_progress(self) -> None:
        """Drop what trainers of earlier incarnations have reached or asked for."""
        self.rewind_asked.clear()
        self.progress.clear()

    def forget_missing(self) -> None:
        """Drop what was said of arenas that this incarnation has made anew."""
        self.missing.clear()

    async def settle_missing(self) -> None:
        """Wait until whatever removes arenas on one node is likely to have done so on all."""
        await asyncio.sleep(self.timing.node_timeout)
        await self.refresh()
        self.arena_missing.clear()

    async def until_evacuation(self, seconds: float) -> bool:
        """Wait for a request to evacuate a node, for up to ``seconds``; True if there is one."""
        if not self.evacuations:
            self._evacuation_asked.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._evacuation_asked.wait(), seconds)
        return bool(self.evacuations)

    def answer_evacuation(self, number: str) -> None:
        """Drop a request that was carried out or refused."""
        self.evacuations.pop(number, None)

    def forget_silence(self) -> None:
        """Drop what ``silent`` was set for: all nodes have just been asked."""
        self.silent.clear()

    def take_failure(self) -> BaseException | None:
        """The coordinator's own failure, once; ``silent`` is cleared, as this answers it."""
        self.silent.clear()
        error, self.failure = self.failure, None
        return error

    async def ask_all(self, requests: Mapping[str, m.Message]) -> dict[str, Any]:
        """Send each node its request; the answers.  A refusal or silence is raised."""
        if away := requests.keys() - self.links.keys():
            raise ControlPlaneError(f"no connection to the SMP of {', '.join(sorted(away))} now")
        asked = (self.links[n].demand(r, REQUEST_TIMEOUT_SECONDS) for n, r in requests.items())
        return dict(zip(requests, await asyncio.gather(*asked), strict=True))

    def _fail(self, error: BaseException) -> None:
        """Record an error of ours: work under way may never end, so this incarnation must."""
        self.failure = self.failure or error
        self.silent.set()

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
