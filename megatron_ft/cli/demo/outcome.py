"""What became of each fault: how it was noticed, from where and how fast training came back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.cli.demo.settings import Record, Seen, Strike
from megatron_ft.cli.demo.trace import TraceLine

Traces = Mapping[int, Sequence[TraceLine]]
"""Ranks to all their lines."""

# Events by which the supervisor shows that it has noticed a death.
_DETECTIONS = ("trainer_died", "silent", "smp_restarted", "world_ended", "node_lost")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One fault and the recovery from it.  All times are seconds; None where it never came.

    ``seconds_to_first_iteration`` runs from the strike to the end of the first iteration
    after the restore; ``detect``, ``decide`` (fence the old processes, decide), ``rebuild``
    (encoder world and parity), ``start`` (processes, imports, ``copy_in_seconds``) and
    ``iterate`` add up to it.  ``coding_seconds`` is the work on parity alone.
    ``seconds_to_catch_up`` runs until the iteration that the fault interrupted is finished.
    """

    victim: str
    text: str
    kind: str
    during: int
    fraction: float
    detect: float | None
    source: str | None = None
    lost_shards: tuple[str, ...] = ()
    restored_iteration: int | None = None
    iterations_lost: int | None = None
    decide: float | None = None
    rebuild: float | None = None
    start: float | None = None
    iterate: float | None = None
    coding_seconds: float | None = None
    copy_in_seconds: float | None = None
    seconds_to_first_iteration: float | None = None
    seconds_to_catch_up: float | None = None


def outcomes(record: Record, traces: Traces) -> list[Outcome]:
    """What became of each strike, in their order."""
    ends = [strike.monotonic for strike in record.strikes[1:]] + [float("inf")]
    return [
        _outcome(record, strike, until, traces)
        for strike, until in zip(record.strikes, ends, strict=False)
    ]


def _outcome(record: Record, strike: Strike, until: float, traces: Traces) -> Outcome:
    seen = [s for s in record.seen if strike.monotonic <= s.event.monotonic < until]
    detected = _first(seen, *_DETECTIONS)
    noticed = Outcome(
        victim=strike.victim,
        text=strike.text,
        kind=strike.fault.kind.value,
        during=strike.during,
        fraction=strike.fault.fraction,
        detect=None if detected is None else detected.event.monotonic - strike.monotonic,
    )
    # Several starts in a row when something failed in between: the last one counts.
    incarnations = [s.incarnation for s in seen if s.event.kind == "training"]
    if detected is None or not incarnations or incarnations[-1] <= strike.incarnation:
        return noticed
    of_incarnation = [s for s in seen if s.incarnation == incarnations[-1]]
    restored = _with_source(noticed, record, of_incarnation, incarnations[-1])
    return _with_times(restored, strike, of_incarnation, incarnations[-1], traces)


def _with_source(
    outcome: Outcome, record: Record, of_incarnation: list[Seen], incarnation: int
) -> Outcome:
    decided = _first(of_incarnation, "restoring")
    if decided is None:
        return outcome
    fields = decided.event.fields
    return dataclasses.replace(
        outcome,
        source=fields["source"],
        lost_shards=tuple(fields["lost"]),
        restored_iteration=fields["iteration"],
        coding_seconds=max(
            (b.seconds for n, b in record.rebuilt if n == incarnation), default=None
        ),
        copy_in_seconds=max(
            (b.seconds for n, b in record.restored if n == incarnation), default=None
        ),
    )


def _with_times(
    outcome: Outcome, strike: Strike, of_incarnation: list[Seen], incarnation: int, traces: Traces
) -> Outcome:
    """Add when each step was over; the steps of an incarnation that trains all have their
    events."""
    decided, started, training = (
        _seconds_until(strike, of_incarnation, kind)
        for kind in ("restoring", "trainers_started", "training")
    )
    assert started is not None and training is not None, (
        "an incarnation trains after it was started"
    )
    lines = [line for rank in traces.values() for line in rank]
    reached = max(line.iteration for line in lines if line.incarnation < incarnation)
    again = [line for line in lines if line.incarnation == incarnation]
    first = _seconds_to_end(strike, again, min((line.iteration for line in again), default=-1))
    restored = 0 if outcome.restored_iteration is None else outcome.restored_iteration
    if decided is None or not outcome.lost_shards:  # then nothing was rebuilt
        decided = started
    return dataclasses.replace(
        outcome,
        iterations_lost=reached - restored,
        decide=decided - (outcome.detect or 0.0),
        rebuild=started - decided if outcome.lost_shards else None,
        start=training - started,
        iterate=None if first is None else first - training,
        seconds_to_first_iteration=first,
        seconds_to_catch_up=_seconds_to_end(strike, again, reached + 1),
    )


def _first(seen: Sequence[Seen], *kinds: str) -> Seen | None:
    return next((s for s in seen if s.event.kind in kinds), None)


def _seconds_until(strike: Strike, seen: Sequence[Seen], kind: str) -> float | None:
    found = _first(seen, kind)
    return None if found is None else found.event.monotonic - strike.monotonic


def _seconds_to_end(strike: Strike, lines: Sequence[TraceLine], iteration: int) -> float | None:
    """From the strike until the last rank finished an iteration, None if none did."""
    ends = [line.time for line in lines if line.iteration == iteration]
    return max(ends) - strike.wall if ends else None
