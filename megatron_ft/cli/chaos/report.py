"""Results of chaos cases: kept as JSON, shown as tables, and as text where one failed."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.cli.chaos.cases import FAULTS, VICTIMS, Case, losses_of, tabled
from megatron_ft.cli.chaos.runner import CaseOutcome, ChaosSettings
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme

FAILED = "failed"


class CaseRestore(msgspec.Struct, frozen=True):
    """One restore: which iteration, from where, and the least that it had to bring back."""

    iteration: int
    least: int
    source: str


class CaseResult(msgspec.Struct, frozen=True):
    """One case that ran on ``date``, as it is kept; ``result`` is FAILED or a few words."""

    case: str
    date: str
    result: str
    problems: tuple[str, ...]
    done: tuple[str, ...]
    restored: tuple[CaseRestore, ...]
    compared: int
    reached: bool
    seconds: float

    @property
    def good(self) -> bool:
        """True if the case passed."""
        return self.result != FAILED

    @classmethod
    def of(cls, outcome: CaseOutcome) -> CaseResult:
        """The part of a case's outcome that is kept."""
        verdict, story = outcome.verdict, outcome.story
        return cls(
            case=str(outcome.case),
            date=str(date.today()),
            result=in_words(outcome),
            problems=tuple(verdict.problems),
            done=tuple(strike.text for strike in story.strikes),
            restored=tuple(CaseRestore(r.iteration, r.least, r.source) for r in verdict.restores),
            compared=verdict.compared,
            reached=story.reached,
            seconds=round(outcome.seconds, 1),
        )


def in_words(outcome: CaseOutcome) -> str:
    """The end of a case in a few words: the sources of its restores, "refused", FAILED."""
    if not outcome.verdict.good:
        return FAILED
    if outcome.story.end == "stopped":
        return "refused"
    sources = dict.fromkeys(restore.source for restore in outcome.verdict.restores)
    return ", ".join(sources) or "continued"


def unreached(results: Iterable[CaseResult]) -> list[str]:
    """Points of the table that no case has reached."""
    reached = {Case.parse(result.case).point for result in results if result.reached}
    return [name for name in tabled() if name not in reached]


class _Table(msgspec.Struct):
    setting: dict[str, Any]
    cases: tuple[CaseResult, ...]


def write(path: Path, results: Iterable[CaseResult], settings: ChaosSettings) -> None:
    """Keep results in a file."""
    table = _Table(_setting(settings), tuple(results))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def read(path: Path, settings: ChaosSettings) -> list[CaseResult]:
    """The results that ``write`` kept, none if there is no file.

    ConfigError if the file holds something else, or results of other settings.
    """
    if not path.exists():
        return []
    try:
        table = msgspec.json.decode(path.read_bytes(), type=_Table)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no results of `megatron-ft chaos`: {error}") from error
    if table.setting != _setting(settings):
        raise ConfigError(
            f"{path} is of {table.setting}, but this is {_setting(settings)}: give the same "
            "flags, or another --json"
        )
    return list(table.cases)


def _setting(settings: ChaosSettings) -> dict[str, Any]:
    return {
        "nodes": settings.nodes,
        "protect": settings.protect,
        "ranks_per_node": settings.ranks_per_node,
        "seed": settings.seed,
        "command": list(settings.command),
    }


def shown(result: CaseResult) -> str:
    """The result in a table, where nobody overlooks a failure."""
    return result.result if result.good else "**FAILED**"


def repeat(case: str, settings: ChaosSettings) -> str:
    """The command that runs a case again."""
    words = ["megatron-ft", "chaos", "--case", case, "--seed", str(settings.seed)]
    words += ["--nodes", str(settings.nodes), "--protect", settings.protect]
    words += ["--ranks-per-node", str(settings.ranks_per_node)]
    words += ["--", *settings.command] if settings.command else []
    return shlex.join(words)


def markdown(results: Sequence[CaseResult], settings: ChaosSettings) -> str:
    """Place and time, a table of points by further losses, and one of every other fault."""
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
    """True if the case kills one process; such cases have a table of their own."""
    crowd = case.victim in ("trainers", "world", "node")
    return case.fault == "kill" == VICTIMS[case.victim][0] and case.disk and not crowd


def _by_losses(cells: Sequence[tuple[Case, CaseResult]], settings: ChaosSettings) -> list[str]:
    kills = {(c.point, c.victim, c.losses): shown(r) for c, r in cells if _is_plain(c)}
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


def _others(cells: Sequence[tuple[Case, CaseResult]]) -> list[str]:
    rest = [(case, result) for case, result in cells if not _is_plain(case)]
    if not rest:
        return []
    lines = ["| at | fault | nodes lost beside | result |", "| --- | --- | ---: | --- |"]
    for case, result in rest:
        what = f"{case.victim}: {FAULTS[case.fault]}" + ("" if case.disk else " (no disk)")
        lines.append(f"| `{case.point}` | {what} | {case.losses} | {shown(result)} |")
    return lines


def failure(outcome: CaseOutcome, settings: ChaosSettings) -> str:
    """A case that failed, as text: why, what was done, the last events, how to repeat it."""
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
