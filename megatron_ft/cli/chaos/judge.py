"""Whether a job kept its promises while faults struck.  Pure: what happened in, verdict out.

What must be restored is derived from what the job had told before a fault: a snapshot that
was committed is the least that memory serves while no node is lost, one that was committed
with parity while no more nodes are lost than parity makes up for, and one that was drained
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.cli.chaos.trace import Lines, differences, gaps

Event = Mapping[str, Any]


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

    ``end`` is "finished", "stopped" or "hang", ``reason`` why.  ``error`` is its
    name.
    ``oracle`` is empty where nothing was to be compared.
    """

    parity: int
    events: Sequence[Event]
    strikes: Sequence[Struck]
    traces: Mapping[int, Lines]
    oracle: Mapping[int, Lines]
    reached: bool
    end: str
    reason: str = ""
    error: str = ""
    disk: bool = True
    starts: Sequence[tuple[float, int]] = ()
    """Moment and iteration of every start of every rank, where the training tells them."""


@dataclass(frozen=True)
class Restored:
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
    restores: tuple[Restored, ...]
    compared: int

    @property
    def good(self) -> bool:
        """Whether the case passed."""
        return not self.problems


def judge(story: Story) -> Verdict:
    """The verdict."""
    restores = tuple(restored(story))
    problems = [
        *_end(story, restores),
        *_restores(story, restores),
        *_unplanned(story),
        *_bytes(story),
    ]
    compared = sum(len(lines) for lines in story.traces.values()) if story.oracle else 0
    return Verdict(tuple(problems), restores, compared)


def restored(story: Story) -> Iterator[Restored]:
    """Every restore, with what was known to be safe when it was decided."""
    for event, known in _walk(story):
        if event["kind"] == "restoring":
            least, lost = known.least(), len(known.lost)
            yield Restored(event["iteration"], event["source"], least, lost, event["at"])


def _walk(story: Story) -> Iterator[tuple[Event, _Known]]:
    """Every event with what was known to be safe just before it."""
    known = _Known(story.parity)
    happened: list[tuple[float, Event | Struck]] = [(event["at"], event) for event in story.events]
    happened += [(strike.at, strike) for strike in story.strikes]
    suspended: dict[str, int] = {}
    for _, one in sorted(happened, key=lambda pair: pair[0]):
        if isinstance(one, Struck):
            known.lost |= set(one.lost)
            suspended |= one.suspended
            known.fresh = False
            continue
        yield one, known
        if one["kind"] == "node_lost" and one["node"] in suspended:
            known.lost.add(suspended[one["node"]])
        elif one["kind"] == "restoring":
            known.back_to(one["iteration"])
        else:
            known.note(one)


@dataclass
class _Known:
    """What is safe as far as the job has told, and how many nodes are lost since."""

    parity: int
    committed: int = -1
    protected: int = -1
    drained: int = -1
    lost: set[int] = field(default_factory=set)
    fresh: bool = True

    def note(self, event: Event) -> None:
        if event["kind"] == "trainers_started":
            self.fresh = True
        elif event["kind"] == "drained":
            self.drained = event["iteration"]
        elif event["kind"] == "committed":
            self.committed = event["iteration"]
            if event["level"] == "protected":
                self.protected = event["iteration"]
                # All nodes of an incarnation that began after the losses have answered.
                if self.fresh:
                    self.lost.clear()

    def least(self) -> int:
        if not self.lost:
            return max(self.committed, self.drained)
        return max(self.protected if len(self.lost) <= self.parity else -1, self.drained)

    def back_to(self, iteration: int) -> None:
        self.committed = iteration
        self.protected = min(self.protected, iteration)
        self.drained = min(self.drained, iteration)


def _end(story: Story, restores: Sequence[Restored]) -> Iterator[str]:
    if story.end == "hang":
        yield f"hang: {story.reason}"
    if not story.reached:
        yield "the point was never reached, so nothing struck"
    if story.end == "stopped":
        lost = {position for strike in story.strikes for position in strike.lost}
        too_many = len(lost) > story.parity and not story.disk
        if not (too_many and story.error == "UnrecoverableError"):
            yield f"the job stopped: {story.reason}"


def _restores(story: Story, restores: Sequence[Restored]) -> Iterator[str]:
    for one in restores:
        if one.iteration < one.least:
            yield (
                f"iteration {one.iteration} was restored from {one.source}, with {one.lost} "
                f"nodes lost; {one.least} was safe"
            )
        if one.source == "disk" and one.lost <= story.parity:
            yield f"the disk was taken with {one.lost} nodes lost, parity is for {story.parity}"
    kinds = [event["kind"] for event in story.events]
    if "committed" in kinds:
        after = kinds[kinds.index("committed") :]
        if after.count("trainers_started") > after.count("restoring"):
            yield "trainers were started again from nothing"


def _unplanned(story: Story, since: float = 0.0) -> Iterator[str]:
    struck = {node for strike in story.strikes for node in (*strike.nodes, *strike.suspended)}
    for event in story.events:
        told = event["kind"] in ("node_lost", "spare_lost") and event["at"] >= since
        if told and event["node"] not in struck:
            yield f"node {event['node']} was given up, and nothing had struck it"


def _bytes(story: Story) -> Iterator[str]:
    if story.oracle:
        if not story.traces and story.end != "stopped":
            yield "nothing was trained"
        yield from list(differences(story.traces, story.oracle))[:3]
        yield from list(gaps(story.traces))[:3]


RIGHT, HONEST = "right", "honest stop"
WRONG_BYTES, WRONG_START, LOST = "wrong bytes", "wrong start", "lost commit"
NEEDLESS, GIVEN_UP, HANG = "needless stop", "needless loss", "hang"
OUTCOMES = (RIGHT, HONEST, WRONG_BYTES, WRONG_START, LOST, HANG, NEEDLESS, GIVEN_UP)
"""What one fault of a long job can come to; the first two are good, the others the worst first."""


@dataclass(frozen=True)
class Ruling:
    """One of OUTCOMES, and why if it is not a good one."""

    outcome: str
    problems: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return self.outcome in (RIGHT, HONEST)


def rule(story: Story, since: float, spares: int) -> Ruling:
    """What the fault that struck at ``since`` came to in a job whose story goes on until now.

    A stop is honest if more was lost than parity makes up for and nothing is on disk, or if
    more nodes were lost since then than there were ``spares``.
    """
    found = {
        WRONG_BYTES: [*_bytes(story)],
        WRONG_START: [*_starts(story, since)],
        LOST: [
            f"iteration {r.iteration} was restored from {r.source}; {r.least} was safe"
            for r in restored(story)
            if r.at >= since and r.iteration < r.least
        ],
        HANG: [story.reason] if story.end == "hang" else [],
        NEEDLESS: [*_needless(story, since, spares)],
        GIVEN_UP: [*_unplanned(story, since)],
    }
    for outcome in OUTCOMES[2:]:
        if found[outcome]:
            return Ruling(outcome, tuple(found[outcome]))
    stopped = any(e["kind"] == "stopped" and e["at"] >= since for e in story.events)
    return Ruling(HONEST if stopped else RIGHT)


def _starts(story: Story, since: float) -> Iterator[str]:
    """Starts of ranks at another iteration than the job had decided, or from nothing."""
    due, committed, decided = 0, False, False
    told: list[tuple[float, Event | int]] = [(event["at"], event) for event in story.events]
    told += [start for start in story.starts if start[0] >= since]
    for at, one in sorted(told, key=lambda pair: pair[0]):
        if isinstance(one, int):
            if one != due:
                yield f"a rank started at iteration {one}, where {due} was decided"
        elif one["kind"] == "committed":
            committed = True
        elif one["kind"] == "restoring":
            due, decided = one["iteration"], True
        elif one["kind"] == "trainers_started":
            if at >= since and committed and not decided:
                yield "trainers were started again from nothing"
            decided = False


def _needless(story: Story, since: float, spares: int) -> Iterator[str]:
    nodes = {node for strike in story.strikes if strike.at >= since for node in strike.nodes}
    for event, known in _walk(story):
        if event["kind"] not in ("stopped", "crashed") or event["at"] < since:
            continue
        too_many = len(known.lost) > story.parity and known.drained < 0
        honest = {"UnrecoverableError": too_many, "NoSpareError": len(nodes) > spares}
        if not honest.get(event["error"], False):
            yield f"the job stopped with {len(known.lost)} nodes lost: {event['text']}"
