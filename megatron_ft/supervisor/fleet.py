"""The SMPs of a job: connections, leases and heartbeats, requests to them and their events.

A lease is renewed with each heartbeat.  An SMP that hears none for the length of the lease kills
its own trainers, and a new supervisor is admitted there only after that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import zmq
import zmq.asyncio

from megatron_ft.core.errors import ControlPlaneError, StaleIncarnationError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import EventSubscription
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.hanging_drains import HangingDrains
from megatron_ft.supervisor.heartbeats import Heartbeats
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.smp_link import SmpLink

REQUEST_TIMEOUT_SECONDS = 30.0

MOST_NODES = 16384
"""Connections that libzmq provides for; by default it refuses the 1,024th."""

HOLDER = "drain"
"""The supervisor's name as a reader; it has one drain at a time."""

_ANSWER_INTERVALS = 4
"""Heartbeats' intervals that the answer to one is awaited for."""

EventListener = Callable[[m.NodeEvent], None]
AnswerListener = Callable[[m.LeaseAnswer, m.LeaseAnswer | None], None]
"""Takes the answer to a heartbeat, and the one before it of the same node."""


class EvacuationRequests:
    """Requests to move the ranks of a node elsewhere, and the result of each.

    Users ask an SMP, an SMP that is to end asks by itself, and the health check asks here.
    ``waiting`` are those without an answer, by their numbers; ``moves`` has the result of the last
    request of each node, for status.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, m.Evacuate] = {}
        self.moves: dict[str, dict[str, Any]] = {}
        self._known: set[str] = set()
        self._asked = asyncio.Event()

    def ask(self, request: m.Evacuate) -> None:
        """Take a request, unless it came before: every heartbeat brings it again."""
        if request.number not in self._known:
            self._known.add(request.number)
            self.waiting[request.number] = request
            self._asked.set()

    async def until_asked(self, seconds: float) -> bool:
        """Wait for a request for up to ``seconds``; True if there is one."""
        if not self.waiting:
            self._asked.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), seconds)
        return bool(self.waiting)

    def answer(self, number: str) -> None:
        """Drop a request that was carried out or refused."""
        self.waiting.pop(number, None)

    def note_move(self, node: str, **what: Any) -> None:
        """Record what became of a node that was to be evacuated."""
        self.moves[node] = what


class Fleet:
    """One connection and one heartbeat for each node of a job, over all its incarnations.

    ``answers`` are the nodes' newest answers to heartbeats, ``progress`` the last iteration of
    each shard, ``heartbeats`` the newest reports of all ranks.  ``scrub_percent`` is the share of
    one core that each node's scrub may use.  ``alarm`` is set when a node is silent, when this
    supervisor does not lead any more, and when work of its own has failed.
    """

    link_type: type[SmpLink] = SmpLink
    """The class of a connection; a benchmark that counts messages replaces it."""

    def __init__(
        self, keys: JobKeys, observers: Observers, timing: Timing, scrub_percent: float = 0.0
    ) -> None:
        self.links: dict[str, SmpLink] = {}
        self.incarnation = 0
        self.timing, self.observers, self.scrub_percent = timing, observers, scrub_percent
        self.answers: dict[str, m.LeaseAnswer] = {}
        self.progress: dict[str, int] = {}
        self.heartbeats = Heartbeats()
        self.alarm = asyncio.Event()
        self.evacuations = EvacuationRequests()
        self.hanging_drains = HangingDrains(observers)
        self._keys, self._context = keys, zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_NODES)
        self._tasks: set[asyncio.Future[Any]] = set()
        self._subscriptions: dict[str, EventSubscription] = {}
        self._listeners: list[EventListener] = []
        self._answer_listeners: list[AnswerListener] = []
        self._superseded = ""
        self._failure: BaseException | None = None

    # Connections.

    def connect(self, node: str, endpoint: str) -> None:
        """Use ``endpoint`` for ``node`` from now on."""
        self.disconnect(node)
        subscription = self._subscriptions.setdefault(node, EventSubscription())
        link = self.link_type(self._context, node, endpoint, self._keys, self.take, subscription)
        self.links[node] = link
        self.keep(self._renew_lease(link))

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
            await asyncio.gather(*(self._ask_answer(link, seconds) for link in self._all_links()))
        for node in list(self.links):
            self.disconnect(node)
        self._context.term()

    def _all_links(self) -> Sequence[SmpLink]:
        return list(self.links.values())

    # Heartbeats.

    async def refresh(self, but: Collection[str] = ()) -> None:
        """One round of heartbeats to all nodes but these at once; updates what they say."""
        links = [link for link in self._all_links() if link.node not in but]
        await asyncio.gather(*(self._ask_answer(link, self.timing.lease) for link in links))

    async def _renew_lease(self, link: SmpLink) -> None:
        """Renew one node's lease as long as its link is in use.

        Every node has a task of its own, so that one which does not answer never
        delays the leases of the others.
        """
        while self.links.get(link.node) is link and not self._superseded:
            begun = time.monotonic()
            await self._ask_answer(link, self.timing.lease)
            link.count_silence(begun)
            if self.silent_nodes([link.node]):
                self.alarm.set()
            await asyncio.sleep(self.timing.heartbeat)

    async def _ask_answer(self, link: SmpLink, seconds: float) -> None:
        """Renew the lease of a node for so long, and take its answer."""
        arrived = link.subscription.stream, link.subscription.number
        lease = m.Lease(self.incarnation, seconds, link.clock, self.scrub_percent, *arrived)
        try:
            answer = await link.ask(lease, _ANSWER_INTERVALS * self.timing.heartbeat)
        except ControlPlaneError:
            return
        if lease.incarnation != self.incarnation:
            return
        if isinstance(answer, m.LeaseAnswer):
            link.note_clock(answer.clock)
            self.take_answer(answer)
        elif link.clock and isinstance(answer.error, StaleIncarnationError):
            self._superseded = answer.reason
            self.alarm.set()

    def take_answer(self, answer: m.LeaseAnswer) -> None:
        """Note what a node says, and pass it on."""
        before, self.answers[answer.node] = self.answers.get(answer.node), answer
        self.progress.update(answer.progress)
        self.heartbeats.record(answer.node, answer.heartbeats)
        self.hanging_drains.note(answer.node, answer.hanging)
        for request in answer.evacuations:
            self.evacuations.ask(request)
        for listener in list(self._answer_listeners):
            listener(answer, before)

    def say(self, what: Callable[[m.LeaseAnswer], bool]) -> bool:
        """True if some connected node has said ``what`` in its last answer."""
        return any(what(said) for node, said in self.answers.items() if node in self.links)

    @property
    def hanging(self) -> list[str]:
        """Drains on connected nodes that were killed and do not end, each with its node."""
        return self.hanging_drains.on(self.links)

    def silent_nodes(self, nodes: Iterable[str]) -> list[str]:
        """Those of ``nodes`` that have answered no heartbeat for ``node_timeout``.

        Heartbeats are counted, not seconds: a process that was suspended has sent none, and its
        silence says nothing about the nodes.
        """
        seconds = (1 + _ANSWER_INTERVALS) * self.timing.heartbeat
        links = [self.links[node] for node in nodes if node in self.links]
        return [link.node for link in links if link.missed * seconds >= self.timing.node_timeout]

    async def quiet_nodes(self) -> list[str]:
        """Nodes that do not answer just now; they may be lost, which takes longer to know.

        Ranks elsewhere fail within moments of a node's loss, before it is known here.
        """
        before = time.monotonic()
        await self.refresh()
        return [node for node, link in self.links.items() if link.last_heard < before]

    # Incarnations.

    def begin_incarnation(self, incarnation: int) -> None:
        """Lead ``incarnation`` from now on: events and answers of earlier ones count no more."""
        self.incarnation = incarnation

    def forget_progress(self) -> None:
        """Drop what trainers of earlier incarnations have reached."""
        self.progress.clear()

    def require_lead(self) -> None:
        """StaleIncarnationError when a node that obeyed this supervisor obeys a later
        incarnation."""
        if self._superseded:
            raise StaleIncarnationError(
                f"another supervisor leads this job now: {self._superseded}. This one ends; the "
                "job is the other's"
            )

    def forget_silence(self) -> None:
        """Drop what ``alarm`` was set for: all nodes have just been asked."""
        self.alarm.clear()

    def take_failure(self) -> BaseException | None:
        """The error of work of our own, once; ``alarm`` is cleared, as this answers it."""
        self.alarm.clear()
        error, self._failure = self._failure, None
        return error

    def forget_failure(self) -> None:
        """Drop the error of an incarnation that has ended."""
        self._failure = None

    # Requests and events.

    async def ask_all(self, requests: Mapping[str, m.Message]) -> dict[str, Any]:
        """Send each node its request; the answers.  A refusal or silence is raised."""
        if away := requests.keys() - self.links.keys():
            raise ControlPlaneError(f"no connection to the SMP of {', '.join(sorted(away))} now")
        asked = (self.links[n].demand(r, REQUEST_TIMEOUT_SECONDS) for n, r in requests.items())
        return dict(zip(requests, await asyncio.gather(*asked), strict=True))

    async def hold(self, snapshot: SnapshotId, nodes: Sequence[str]) -> None:
        """Pin a snapshot on these nodes for a drain; ControlPlaneError if one refuses."""
        await self.ask_all({n: m.Hold(self.incarnation, HOLDER, snapshot) for n in nodes})

    async def release(self, nodes: Sequence[str]) -> None:
        """End ``hold``: each node knows of it, or is given up, or this incarnation is over.

        A request that is lost is repeated: until the next drain, which may wait for a snapshot
        that has no slot, nothing else would end it.
        """
        await asyncio.gather(*(self._unhold(node, self.incarnation) for node in nodes))

    async def _unhold(self, node: str, incarnation: int) -> None:
        while node in self.links and self.incarnation == incarnation:
            with suppress(ControlPlaneError):
                request = m.Unhold(incarnation, HOLDER)
                await self.links[node].ask(request, REQUEST_TIMEOUT_SECONDS)
                return

    def listen(self, listener: EventListener) -> None:
        """Pass every event of the present incarnation to ``listener`` from now on."""
        self._listeners.append(listener)

    def listen_answers(self, listener: AnswerListener) -> None:
        """Pass every answer to a heartbeat to ``listener`` from now on."""
        self._answer_listeners.append(listener)

    @contextmanager
    def listening(self, *listeners: EventListener) -> Iterator[None]:
        """Pass events to ``listeners`` as long as the context is entered."""
        self._listeners += listeners
        try:
            yield
        finally:
            for listener in listeners:
                self._listeners.remove(listener)

    @contextmanager
    def listening_answers(self, listener: AnswerListener) -> Iterator[None]:
        """Pass answers to ``listener`` as long as the context is entered."""
        self._answer_listeners.append(listener)
        try:
            yield
        finally:
            self._answer_listeners.remove(listener)

    def take(self, event: m.NodeEvent) -> None:
        """Pass an event on to all listeners.

        Nothing is raised: the link must continue reading, as its node is not silent.
        """
        if event.incarnation != self.incarnation:
            return
        try:
            for listener in list(self._listeners):
                listener(event)
        except Exception as error:
            self._fail(error)

    # Work in the background.

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done; an error ends the incarnation, as what it was to do never will be."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.alarm.set()
