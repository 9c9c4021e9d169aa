"""The console of a job: what is worth a line, and how often."""

from __future__ import annotations

from megatron_ft.cli.console import MOST_LINES, WINDOW_SECONDS, Console
from megatron_ft.supervisor.events import AbortedEvent, CommittedEvent, EventFacts, JobEvent


def printed(*events: JobEvent) -> list[str]:
    lines: list[str] = []
    console = Console(lambda line: lines.append(line.partition("] ")[2]))
    console._start = 0.0
    for event in events:
        console.on_event(event)
    return lines


def event(facts: EventFacts, text: str, at: float = 0.0) -> JobEvent:
    return JobEvent(facts.kind, text, monotonic=at, facts=facts)


def test_commits_are_printed_less_and_less_often() -> None:
    commits = [event(CommittedEvent(level="local"), str(n)) for n in range(1, 3002)]
    first = [str(n) for n in range(1, 100, 10)]
    assert printed(*commits) == [*first, *map(str, range(101, 1000, 100)), "1001", "2001", "3001"]


def test_a_cause_that_repeats_fills_no_console() -> None:
    """108 snapshots given up in a minute take five lines and one that counts the others."""
    given_up = [event(AbortedEvent(), f"given up {n}", n * 0.5) for n in range(108)]
    later = event(AbortedEvent(), "given up later", WINDOW_SECONDS)
    lines = printed(*given_up, later)
    assert lines[:MOST_LINES] == [f"given up {n}" for n in range(MOST_LINES)]
    assert lines[MOST_LINES:] == [
        f"{108 - MOST_LINES} more events like this (aborted) in 60 s: events.jsonl has them",
        "given up later",
    ]


def test_what_happens_once_is_never_folded() -> None:
    ends = [JobEvent("trainer_died", f"rank {n}", monotonic=0.0) for n in range(64)]
    assert printed(*ends) == [f"rank {n}" for n in range(64)]
