"""The ruling on one fault of a long job, as a pure function of the job's story so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.cli.chaos.judge import Story, byte_problems, restored, unplanned, walk
from megatron_ft.cli.run import EXIT_NO_SPARE, EXIT_UNRECOVERABLE
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import CommittedEvent, RestoringEvent, StoppedEvent

RIGHT, HONEST = "right", "honest stop"
WRONG_BYTES, WRONG_START, LOST = "wrong bytes", "wrong start", "lost commit"
NEEDLESS, GIVEN_UP, HANG = "needless stop", "needless loss", "hang"
OUTCOMES = (RIGHT, HONEST, WRONG_BYTES, WRONG_START, LOST, HANG, NEEDLESS, GIVEN_UP)
"""Outcomes of one fault of a long job; the first two are good, the others the worst first."""


@dataclass(frozen=True)
class Ruling:
    """One of OUTCOMES, and why if it is not a good one."""

    outcome: str
    problems: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return self.outcome in (RIGHT, HONEST)


def rule(story: Story, since: float, spares: int) -> Ruling:
    """The outcome of the fault that struck at ``since``, by the job's story until now.

    A stop is honest if more was lost than parity makes up for and nothing is on disk, or if
    more nodes were lost since then than there were ``spares``.
    """
    found = {
        WRONG_BYTES: [*byte_problems(story)],
        WRONG_START: [*_starts(story, since)],
        LOST: [
            f"iteration {r.iteration} was restored from {r.source}; {r.least} was safe"
            for r in restored(story)
            if r.at >= since and r.iteration < r.least
        ],
        HANG: [story.reason] if story.end == "hang" else [],
        NEEDLESS: [*_needless(story, since, spares)],
        GIVEN_UP: [*unplanned(story, since)],
    }
    for outcome in OUTCOMES[2:]:
        if found[outcome]:
            return Ruling(outcome, tuple(found[outcome]))
    stopped = any(isinstance(e.facts, StoppedEvent) and e.at >= since for e in story.events)
    return Ruling(HONEST if stopped else RIGHT)


def _starts(story: Story, since: float) -> Iterator[str]:
    """Starts of ranks at another iteration than the job had decided, or from nothing."""
    due, committed, decided = 0, False, False
    happened: list[tuple[float, LoggedEvent | int]] = [(event.at, event) for event in story.events]
    happened += [start for start in story.starts if start[0] >= since]
    for at, one in sorted(happened, key=lambda pair: pair[0]):
        if isinstance(one, int):
            if one != due:
                yield f"a rank started at iteration {one}, where {due} was decided"
        elif isinstance(one.facts, CommittedEvent):
            committed = True
        elif isinstance(one.facts, RestoringEvent):
            due, decided = one.facts.iteration, True
        elif one.kind == "trainers_started":
            if at >= since and committed and not decided:
                yield "trainers were started again from nothing"
            decided = False


def _needless(story: Story, since: float, spares: int) -> Iterator[str]:
    nodes = {node for strike in story.strikes if strike.at >= since for node in strike.nodes}
    for event, known in walk(story):
        facts = event.facts
        if not isinstance(facts, StoppedEvent) or event.at < since:
            continue
        too_many = len(known.lost) > story.parity and known.drained < 0
        honest = {EXIT_UNRECOVERABLE: too_many, EXIT_NO_SPARE: len(nodes) > spares}
        if not honest.get(facts.code, False):
            yield f"the job stopped with {len(known.lost)} nodes lost: {event.text}"
