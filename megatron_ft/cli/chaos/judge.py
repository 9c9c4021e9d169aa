"""The judge: did a job keep its promises while faults struck?  A pure function of its story.

The least that must be restored follows from the job's events before a fault.  While no node is
lost, memory serves the newest committed snapshot; while no more are lost than parity makes up
for, the newest committed with parity; else the newest that was drained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.cli.chaos.trace import Lines, differences, gaps
from megatron_ft.cli.run import EXIT_UNRECOVERABLE
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import (
    CommittedEvent,
    DrainedEvent,
    NodeLostEvent,
    RestoringEvent,
    SpareLostEvent,
)


@dataclass(frozen=True)
class Struck:
    """One thing that was done to the job.

    ``lost`` are positions of nodes whose memory is gone or wrong from then on, ``nodes`` the
    names of those that the job may give up because of it; ``suspended`` maps such names to their
    positions where memory is only lost once the job has given the node up.
    """

    at: float
    text: str
    lost: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    suspended: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    """One case as it happened.

    ``end`` is "finished", "stopped" or "hang", ``reason`` why, ``code`` the exit code of the job.
    ``oracle`` is empty where nothing was to be compared.
    """

    parity: int
    events: Sequence[LoggedEvent]
    strikes: Sequence[Struck]
    traces: Mapping[int, Lines]
    oracle: Mapping[int, Lines]
    reached: bool
    end: str
    reason: str = ""
    code: int = 0
    disk: bool = True
    starts: Sequence[tuple[float, int]] = ()
    """Moment and iteration of every start of every rank, where the training tells them."""


@dataclass(frozen=True)
class JudgedRestore:
    """One restore and the least that it had to bring back, -1 for nothing."""

    iteration: int
    source: str
    least: int
    lost: int
    at: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """``problems`` is empty if every promise was kept."""

    problems: tuple[str, ...]
    restores: tuple[JudgedRestore, ...]
    compared: int

    @property
    def good(self) -> bool:
        return not self.problems


def judge(story: Story) -> Verdict:
    restores = tuple(restored(story))
    problems = [
        *_end(story),
        *_restores(story, restores),
        *unplanned(story),
        *byte_problems(story),
    ]
    compared = sum(len(lines) for lines in story.traces.values()) if story.oracle else 0
    return Verdict(tuple(problems), restores, compared)


def restored(story: Story) -> Iterator[JudgedRestore]:
    for event, known in walk(story):
        if isinstance(facts := event.facts, RestoringEvent):
            least, lost = known.least(), len(known.lost)
            yield JudgedRestore(facts.iteration, facts.source, least, lost, event.at)


def walk(story: Story) -> Iterator[tuple[LoggedEvent, Known]]:
    """Every event with what was known to be safe just before it."""
    known = Known(story.parity)
    happened: list[tuple[float, LoggedEvent | Struck]] = [
        (event.at, event) for event in story.events
    ]
    happened += [(strike.at, strike) for strike in story.strikes]
    suspended: dict[str, int] = {}
    for _, one in sorted(happened, key=lambda pair: pair[0]):
        if isinstance(one, Struck):
            known.lost |= set(one.lost)
            suspended |= one.suspended
            known.fresh = False
            continue
        yield one, known
        facts = one.facts
        if isinstance(facts, NodeLostEvent) and facts.node in suspended:
            known.lost.add(suspended[facts.node])
        elif isinstance(facts, RestoringEvent):
            known.back_to(facts.iteration)
        else:
            known.record(one)


@dataclass
class Known:
    """Snapshots that are safe by the job's events so far, and the nodes lost since."""

    parity: int
    committed: int = -1
    protected: int = -1
    drained: int = -1
    lost: set[int] = field(default_factory=set)
    fresh: bool = True

    def record(self, event: LoggedEvent) -> None:
        facts = event.facts
        if event.kind == "trainers_started":
            self.fresh = True
        elif isinstance(facts, DrainedEvent):
            self.drained = facts.iteration
        elif isinstance(facts, CommittedEvent):
            self.committed = facts.iteration
            if facts.level == "protected":
                self.protected = facts.iteration
                # All nodes of an incarnation that began after the losses have answered.
                if self.fresh:
                    self.lost.clear()

    def least(self) -> int:
        """The least iteration that a restore has to bring back now, -1 for nothing."""
        if not self.lost:
            return max(self.committed, self.drained)
        return max(self.protected if len(self.lost) <= self.parity else -1, self.drained)

    def back_to(self, iteration: int) -> None:
        """Forget what is newer than ``iteration``, to which training was set back."""
        self.committed = iteration
        self.protected = min(self.protected, iteration)
        self.drained = min(self.drained, iteration)


def _end(story: Story) -> Iterator[str]:
    if story.end == "hang":
        yield f"hang: {story.reason}"
    if not story.reached:
        yield "the point was never reached, so nothing struck"
    if story.end == "stopped":
        lost = {position for strike in story.strikes for position in strike.lost}
        too_many = len(lost) > story.parity and not story.disk
        if not (too_many and story.code == EXIT_UNRECOVERABLE):
            yield f"the job stopped: {story.reason}"


def _restores(story: Story, restores: Sequence[JudgedRestore]) -> Iterator[str]:
    for one in restores:
        if one.iteration < one.least:
            yield (
                f"iteration {one.iteration} was restored from {one.source}, with {one.lost} "
                f"nodes lost; {one.least} was safe"
            )
        if one.source == "disk" and one.lost <= story.parity:
            yield f"the disk was taken with {one.lost} nodes lost, parity is for {story.parity}"
    kinds = [event.kind for event in story.events]
    if "committed" in kinds:
        after = kinds[kinds.index("committed") :]
        if after.count("trainers_started") > after.count("restoring"):
            yield "trainers were started again from nothing"


def unplanned(story: Story, since: float = 0.0) -> Iterator[str]:
    struck = {node for strike in story.strikes for node in (*strike.nodes, *strike.suspended)}
    for event in story.events:
        facts = event.facts
        if not isinstance(facts, NodeLostEvent | SpareLostEvent) or event.at < since:
            continue
        if facts.node not in struck:
            yield f"node {facts.node} was given up, and nothing had struck it"


def byte_problems(story: Story) -> Iterator[str]:
    if story.oracle:
        if not story.traces and story.end != "stopped":
            yield "nothing was trained"
        yield from list(differences(story.traces, story.oracle))[:3]
        yield from list(gaps(story.traces))[:3]
