"""Outcomes of many cases as tables for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from megatron_ft.fault_points import POINTS
from megatron_ft.testing.chaos.cases import FAULTS, VICTIMS, losses_of
from megatron_ft.testing.chaos.runner import Outcome
from megatron_ft.testing.chaos.settings import Settings

FAILED = "**FAILED**"


def result(outcome: Outcome) -> str:
    """What became of a case, in a few words."""
    if not outcome.verdict.good:
        return FAILED
    if outcome.story.end == "stopped":
        return "refused"
    sources = dict.fromkeys(restore.source for restore in outcome.verdict.restores)
    return ", ".join(sources) or "went on"


def repeat(outcome: Outcome, settings: Settings) -> str:
    """The command that runs a case again."""
    words = ["megatron-ft", "chaos", "--case", str(outcome.case), "--seed", str(settings.seed)]
    words += ["--nodes", str(settings.nodes), "--protect", settings.protect]
    words += ["--ranks-per-node", str(settings.ranks_per_node)]
    words += ["--", *settings.command] if settings.command else []
    return shlex.join(words)


def unreached(outcomes: Iterable[Outcome]) -> list[str]:
    """Points that no case has reached."""
    reached = {outcome.case.point for outcome in outcomes if outcome.story.reached}
    return [name for name in POINTS if name not in reached]


def markdown(outcomes: Sequence[Outcome], settings: Settings) -> str:
    """Where it ran, points by number of further losses, then every other fault."""
    failed = sum(not outcome.verdict.good for outcome in outcomes)
    compared = sum(outcome.verdict.compared for outcome in outcomes)
    restores = sum(len(outcome.verdict.restores) for outcome in outcomes)
    head = (
        "# Cases of `megatron-ft chaos --table`\n\n"
        f"{len(outcomes)} cases, {failed} failed; {restores} restores, {compared} iterations "
        f"compared bit by bit. {date.today()}, {settings.nodes} nodes, `--protect "
        f"{settings.protect}`, seed {settings.seed}, {os.cpu_count()} cores, {_machine()}, "
        f"Python {platform.python_version()}.\n"
    )
    return "\n".join([head, *_by_losses(outcomes, settings), "", *_others(outcomes)]) + "\n"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}"


def _by_losses(outcomes: Sequence[Outcome], settings: Settings) -> list[str]:
    kills = [o for o in outcomes if o.case.fault == "kill" and "kill" == VICTIMS[o.case.victim][0]]
    kills = [o for o in kills if o.case.disk and o.case.victim not in ("trainers", "world", "node")]
    if not kills:
        return []
    columns = losses_of(kills[0].story.parity)
    cells = {(o.case.point, o.case.victim, o.case.losses): result(o) for o in kills}
    rows = dict.fromkeys((point, victim) for point, victim, _ in cells)
    lines = [
        "| SIGKILL at | to | " + " | ".join(f"+{count} nodes lost" for count in columns) + " |",
        "| --- | --- |" + " --- |" * len(columns),
    ]
    for point, victim in rows:
        found = [cells.get((point, victim, count), "") for count in columns]
        lines.append(f"| `{point}` | {victim} | " + " | ".join(found) + " |")
    return lines


def _others(outcomes: Sequence[Outcome]) -> list[str]:
    plain = ("trainer", "smp", "encoder", "supervisor", "drain")
    rest = [
        o
        for o in outcomes
        if o.case.fault != "kill" or o.case.victim not in plain or not o.case.disk
    ]
    if not rest:
        return []
    lines = ["| at | fault | nodes lost beside | result |", "| --- | --- | ---: | --- |"]
    for o in rest:
        what = f"{o.case.victim}: {FAULTS[o.case.fault]}" + ("" if o.case.disk else " (no disk)")
        lines.append(f"| `{o.case.point}` | {what} | {o.case.losses} | {result(o)} |")
    return lines


def as_json(outcomes: Iterable[Outcome], settings: Settings) -> dict[str, Any]:
    """All that is known of every case."""
    return {
        "date": str(date.today()),
        "nodes": settings.nodes,
        "protect": settings.protect,
        "seed": settings.seed,
        "cases": [
            {
                "case": str(o.case),
                "result": result(o).strip("*").lower(),
                "problems": list(o.verdict.problems),
                "done": [strike.text for strike in o.story.strikes],
                "restored": [
                    {"iteration": r.iteration, "least": r.least, "source": r.source}
                    for r in o.verdict.restores
                ],
                "compared": o.verdict.compared,
                "seconds": round(o.seconds, 1),
                "repeat": repeat(o, settings),
            }
            for o in outcomes
        ],
    }


def failure(outcome: Outcome, settings: Settings) -> str:
    """What is printed of a case that failed."""
    done = "; ".join(strike.text for strike in outcome.story.strikes) or "nothing"
    return "\n".join(
        [
            *(f"  {problem}" for problem in outcome.verdict.problems),
            f"  done to it: {done}",
            outcome.tail,
            f"  logs: {outcome.folder}",
            f"  again: {repeat(outcome, settings)}",
        ]
    )
