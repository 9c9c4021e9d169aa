"""Events of a struck job, as its judge reads them."""

from __future__ import annotations

from typing import Any

from megatron_ft.cli.chaos.trace import Lines
from megatron_ft.supervisor.event_log import LoggedEvent, event_of


def event(at: float, kind: str, **fields: Any) -> LoggedEvent:
    line = {"time": at, "at": at, "job": "j", "kind": kind, "text": kind}
    return event_of({**line, **fields})


def commit(at: float, iteration: int, level: str = "protected") -> LoggedEvent:
    return event(at, "committed", iteration=iteration, level=level)


def restoring(at: float, iteration: int, source: str) -> LoggedEvent:
    return event(at, "restoring", iteration=iteration, source=source)


def trained(*numbers: int, rank: int = 0) -> Lines:
    return [{"iteration": n, "loss": float(n + rank).hex(), "state": f"s{n}"} for n in numbers]


ORACLE = {0: trained(*range(1, 30)), 1: trained(*range(1, 30), rank=1)}
