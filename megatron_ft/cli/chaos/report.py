"""Results of many cases as tables, and what is printed of one that failed."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence

from megatron_ft.cli.chaos.cases import FAULTS, VICTIMS, Case, losses_of
from megatron_ft.cli.chaos.record import Result
from megatron_ft.cli.chaos.runner import Outcome
from megatron_ft.cli.chaos.settings import Settings
from megatron_ft.core.scheme import Scheme


def told(result: Result) -> str:
    """What became of a case, so that nobody overlooks a failure."""
    return result.result if result.good else "**FAILED**"


def repeat(case: str, settings: Settings) -> str:
    """The command that runs a case again."""
    words = ["megatron-ft", "chaos", "--case", case, "--seed", str(settings.seed)]
    words += ["--nodes", str(settings.nodes), "--protect", settings.protect]
    words += ["--ranks-per-node", str(settings.ranks_per_node)]
    words += ["--", *settings.command] if settings.command else []
    return shlex.join(words)


def markdown(results: Sequence[Result], settings: Settings) -> str:
    """Where and when they ran, points by number of further losses, then every other fault."""
    failed = sum(not result.good for result in results)
    compared = sum(result.compared for result in results)
    restores = sum(len(result.restored) for result in results)
    days = sorted({result.date for result in results})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    head = (
        "# Cases of `megatron-ft chaos --table`\n\n"
        f"{len(results)} cases, {failed} failed; {restores} restores, {compared} iterations "
        f"compared bit by bit. {when}, {settings.nodes} nodes, `--protect "
        f"{settings.protect}`, seed {settings.seed}, {os.cpu_count()} cores, {_machine()}, "
        f"Python {platform.python_version()}.\n"
    )
    cells = [(Case.parse(result.case), result) for result in results]
    return "\n".join([head, *_by_losses(cells, settings), "", *_others(cells)]) + "\n"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}"


def _is_plain(case: Case) -> bool:
    """Whether it is the death of one process, of which there is a table of its own."""
    crowd = case.victim in ("trainers", "world", "node")
    return case.fault == "kill" == VICTIMS[case.victim][0] and case.disk and not crowd


def _by_losses(cells: Sequence[tuple[Case, Result]], settings: Settings) -> list[str]:
    kills = {(c.point, c.victim, c.losses): told(r) for c, r in cells if _is_plain(c)}
    if not kills:
        return []
    columns = losses_of(Scheme.parse(settings.protect).parity_members)
    lines = [
        "| SIGKILL at | to | " + " | ".join(f"+{count} nodes lost" for count in columns) + " |",
        "| --- | --- |" + " --- |" * len(columns),
    ]
    for point, victim in dict.fromkeys((point, victim) for point, victim, _ in kills):
        found = [kills.get((point, victim, count), "") for count in columns]
        lines.append(f"| `{point}` | {victim} | " + " | ".join(found) + " |")
    return lines


def _others(cells: Sequence[tuple[Case, Result]]) -> list[str]:
    rest = [(case, result) for case, result in cells if not _is_plain(case)]
    if not rest:
        return []
    lines = ["| at | fault | nodes lost beside | result |", "| --- | --- | ---: | --- |"]
    for case, result in rest:
        what = f"{case.victim}: {FAULTS[case.fault]}" + ("" if case.disk else " (no disk)")
        lines.append(f"| `{case.point}` | {what} | {case.losses} | {told(result)} |")
    return lines


def failure(outcome: Outcome, settings: Settings) -> str:
    """What is printed of a case that failed."""
    done = "; ".join(strike.text for strike in outcome.story.strikes) or "nothing"
    return "\n".join(
        [
            *(f"  {problem}" for problem in outcome.verdict.problems),
            f"  done to it: {done}",
            outcome.tail,
            f"  logs: {outcome.folder}",
            f"  again: {repeat(str(outcome.case), settings)}",
        ]
    )
