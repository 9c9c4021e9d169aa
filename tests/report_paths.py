"""Every way that the reports of a relay and a node below it can take, with what can go wrong there.

The relay ``r`` has the node ``b`` below it.  Each tells its words in order: a report on a
round goes up through ``r``, anything else directly.  The real parts decide; the connections are
queues.  Steps may come in any order, so time-outs are steps as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.coordinator.inbox import Inbox
from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m
from megatron_ft.smp.gathering import Gathering
from megatron_ft.smp.outbox import Outbox
from megatron_ft.smp.reports import snapshot_of

ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)
Step = tuple[str, ...]
NAMES = ("r", "b")
FAULTS = {"cut", "die", "reset"}


@dataclass(frozen=True)
class Script:
    """What r and b tell, in how many rounds, who has heartbeats, and what strikes once.

    So often something is told again that is on its way, or has arrived, directly.
    """

    r: tuple[Any, ...]
    b: tuple[Any, ...]
    rounds: int
    beats: str
    fault: str
    needless: int = 0

    def of(self, name: str) -> tuple[Any, ...]:
        """The words of one of them."""
        return self.r if name == "r" else self.b


SCRIPTS = {
    "urgent words beside reports": Script(
        (m.WriterGone("trainer", "r", 1), m.OrderDone(ONE, "r2")),
        (m.OrderDone(ONE, "b1"), m.WriterGone("trainer", "b", 2)),
        rounds=1,
        beats="r",
        fault="die",
    ),
    "two reports": Script(
        (m.OrderDone(ONE, "r1"),),
        (m.OrderDone(ONE, "b1"), m.OrderDone(TWO, "b2")),
        rounds=1,
        beats="b",
        fault="cut",
        needless=1,
    ),
    "an SMP that was replaced": Script(
        (m.OrderDone(ONE, "r1"), m.OrderDone(ONE, "r2")),
        (),
        rounds=1,
        beats="r",
        fault="die",
        needless=1,
    ),
    "words of a connection that is made anew": Script(
        (),
        (m.WriterGone("trainer", "b", 1), m.OrderDone(ONE, "b2"), m.WriterGone("trainer", "b", 3)),
        rounds=1,
        beats="b",
        fault="reset",
        needless=1,
    ),
}


def introduced() -> Inbox:
    """One that a heartbeat has told of the first stream."""
    inbox = Inbox()
    inbox.begin(1)
    return inbox


@dataclass
class Paths:
    """``up`` is the connection from b to r, ``direct`` those to the coordinator, ``beats`` are
    heartbeats under way, with what they say has been heard, ``beaten`` what the last one said.
    """

    script: Script
    faults: int = 1
    needless: int = 0
    told: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    outboxes: dict[str, Outbox] = field(default_factory=lambda: {n: Outbox(1) for n in NAMES})
    inboxes: dict[str, Inbox] = field(default_factory=lambda: {n: introduced() for n in NAMES})
    up: tuple[m.Gathered, ...] = ()
    direct: dict[str, tuple[Any, ...]] = field(default_factory=lambda: dict.fromkeys(NAMES, ()))
    beats: dict[str, tuple[int, int]] = field(default_factory=dict)
    beaten: dict[str, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(NAMES, (0, 0)))
    gathering: Gathering = field(default_factory=Gathering)
    heard: dict[str, tuple[Any, ...]] = field(default_factory=lambda: dict.fromkeys(NAMES, ()))
    rounds: int = 0
    died: int = -1

    def key(self) -> Any:
        """The same for the same states."""
        outboxes = tuple(
            (o.stream, o._next, len(o.unheard), o.behind) for o in self.outboxes.values()
        )
        inboxes = tuple((i.stream, i.number) for i in self.inboxes.values())
        g = self.gathering
        gathered = (g.snapshot, frozenset(g.missing), tuple(g.frames))
        queues = (self.up, *self.direct.values())
        told = (*self.told.values(), *map(len, self.heard.values()))
        beats = (tuple(sorted(self.beats.items())), tuple(self.beaten.values()))
        rest = (self.rounds, self.faults, self.needless, self.died, beats)
        return told, outboxes, inboxes, gathered, queues, rest

    def clone(self) -> Paths:
        """A copy that goes its own way."""
        new = copy.copy(self)
        for name in ("told", "direct", "heard", "beats", "beaten"):
            setattr(new, name, dict(getattr(self, name)))
        new.outboxes = {name: copy.copy(one) for name, one in self.outboxes.items()}
        new.inboxes = {name: copy.copy(one) for name, one in self.inboxes.items()}
        new.gathering = copy.copy(self.gathering)
        new.gathering.missing = set(self.gathering.missing)
        new.gathering.frames = list(self.gathering.frames)
        return new

    def steps(self) -> Iterator[Step]:
        """What can come next; without faults, all of it comes some time."""
        if self.rounds < self.script.rounds:
            yield ("begin",)
        for name in NAMES:
            if self.told[name] < len(self.script.of(name)):
                yield "tell", name
            if self._may_resend(name):
                yield "resend", name
            if self._may_beat(name):
                yield "beat", name
            if name in self.beats:
                yield "acknowledge", name
            if self.direct[name]:
                yield "arrive", name
        if self.up:
            yield ("climb",)
        if self.gathering.frames:
            yield ("hold",)
        if self.faults:
            yield (self.script.fault,)

    def _may_resend(self, name: str) -> bool:
        """What is under way is told again once at most; what is lost, always."""
        outbox = self.outboxes[name]
        lost = self.inboxes[name].number < outbox._next - 1
        return bool(outbox.unheard and (lost and not self.direct[name] or self.needless))

    def _may_beat(self, name: str) -> bool:
        new = self.beaten[name] != self._arrived(name)
        return new and name in self.script.beats and name not in self.beats

    def _arrived(self, name: str) -> tuple[int, int]:
        """What a heartbeat says."""
        return self.inboxes[name].stream, self.inboxes[name].number

    def perform(self, step: Step) -> None:
        """Take one step; AssertionError if a word comes twice, or before an earlier one."""
        getattr(self, f"_{step[0]}")(*step[1:])

    def _begin(self) -> None:
        self.rounds += 1
        self.gathering.begin((ONE, TWO)[self.rounds - 1], b"coordinator", ("r", "b"))

    def _tell(self, name: str) -> None:
        body = self.script.of(name)[self.told[name]]
        self.told[name] += 1
        snapshot, outbox = snapshot_of([body]), self.outboxes[name]
        if snapshot is None:
            self.direct[name] += (outbox.direct(name, 1, [body]),)
            return
        frame = m.encode(outbox.relayed(name, 1, [body]))
        report = m.Gathered(1, name, snapshot, True, (frame,))
        if name == "b":
            self.up += (report,)
        else:
            self._gather(report)

    def _gather(self, report: m.Gathered) -> None:
        if self.gathering.add(report):
            self._hold()

    def _hold(self) -> None:
        report = self.gathering.take("r", 1)
        if report is not None:
            self.direct["r"] += (report,)

    def _climb(self) -> None:
        report, self.up = self.up[0], self.up[1:]
        self._gather(report)

    def _resend(self, name: str) -> None:
        if self.inboxes[name].number == self.outboxes[name]._next - 1 or self.direct[name]:
            self.needless -= 1
        self.direct[name] += (self.outboxes[name].again(name, 1),)

    def _acknowledge(self, name: str) -> None:
        self.outboxes[name].heard(*self.beats.pop(name))

    def _beat(self, name: str) -> None:
        self.beats[name] = self.beaten[name] = self._arrived(name)

    def _arrive(self, name: str) -> None:
        message, self.direct[name] = self.direct[name][0], self.direct[name][1:]
        if isinstance(message, m.Event):
            self._note(self.inboxes[name].direct(message))
            return
        for frame in message.frames:
            event = m.decode(frame)
            self._note(self.inboxes[event.node].relayed(event))

    def _note(self, events: list[m.Event]) -> None:
        for event in events:
            self.heard[event.node] += (event.body,)
            self.check(event.node)

    def check(self, name: str) -> None:
        """Words are heard once each, in order; of b, and of an r that lives, without gaps."""
        heard, script = self.heard[name], self.script.of(name)
        places = [script.index(body) for body in heard]
        assert places == sorted(set(places)), f"{name} was heard as {places}"
        if name == "b" or self.died < 0:
            assert places == list(range(len(places))), f"{name} was heard as {places}"

    def _cut(self) -> None:
        """A connection to the relay, or the relay's to the coordinator, is made anew."""
        self.faults -= 1
        self.up = ()

    def _reset(self) -> None:
        """The connection of b to the coordinator is made anew."""
        self.faults -= 1
        self.direct["b"] = ()

    def _die(self) -> None:
        """The relay's SMP dies with all that it has, and another one begins."""
        self.faults -= 1
        self.died, self.up, self.direct["r"] = self.told["r"], (), ()
        self.gathering = Gathering()
        self.outboxes["r"] = Outbox(self.outboxes["r"].stream + 1)
        self.inboxes["r"] = Inbox()

    def check_all_heard(self) -> None:
        """Nothing more can come: what either has told was heard, if it has not died since."""
        for name in NAMES:
            script = self.script.of(name)
            owed = script[max(self.died, 0) :] if name == "r" else script
            assert set(owed) <= set(self.heard[name]), f"{name}: only {self.heard[name]} came"


def explore(script: Script) -> int:
    """Take every step from every state; how many there are."""
    first = Paths(script, needless=script.needless)
    seen, waiting = {first.key()}, [first]
    while waiting:
        paths = waiting.pop()
        steps = list(paths.steps())
        if not [step for step in steps if step[0] not in FAULTS]:
            paths.check_all_heard()
        for step in steps:
            after = paths.clone()
            after.perform(step)
            if after.key() not in seen:
                seen.add(after.key())
                waiting.append(after)
    return len(seen)
