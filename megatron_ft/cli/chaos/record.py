"""What is kept of cases that ran, as JSON: enough for the tables, and to go on after a break."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.cli.chaos.cases import Case, tabled
from megatron_ft.cli.chaos.runner import Outcome
from megatron_ft.cli.chaos.settings import Settings
from megatron_ft.core.errors import ConfigError

FAILED = "failed"


class Restore(msgspec.Struct, frozen=True):
    """One restore: which iteration, from where, and the least that it had to bring back."""

    iteration: int
    least: int
    source: str


class Result(msgspec.Struct, frozen=True):
    """What became of one case on ``date``; ``result`` in a few words, FAILED if it failed."""

    case: str
    date: str
    result: str
    problems: tuple[str, ...]
    done: tuple[str, ...]
    restored: tuple[Restore, ...]
    compared: int
    reached: bool
    seconds: float

    @property
    def good(self) -> bool:
        """Whether the case passed."""
        return self.result != FAILED

    @classmethod
    def of(cls, outcome: Outcome) -> Result:
        """What to keep of a case that has just run."""
        verdict, story = outcome.verdict, outcome.story
        return cls(
            case=str(outcome.case),
            date=str(date.today()),
            result=in_words(outcome),
            problems=tuple(verdict.problems),
            done=tuple(strike.text for strike in story.strikes),
            restored=tuple(Restore(r.iteration, r.least, r.source) for r in verdict.restores),
            compared=verdict.compared,
            reached=story.reached,
            seconds=round(outcome.seconds, 1),
        )


def in_words(outcome: Outcome) -> str:
    """What became of a case, in a few words."""
    if not outcome.verdict.good:
        return FAILED
    if outcome.story.end == "stopped":
        return "refused"
    sources = dict.fromkeys(restore.source for restore in outcome.verdict.restores)
    return ", ".join(sources) or "went on"


def unreached(results: Iterable[Result]) -> list[str]:
    """Points of the table that no case has reached."""
    reached = {Case.parse(result.case).point for result in results if result.reached}
    return [name for name in tabled() if name not in reached]


class _Table(msgspec.Struct):
    setting: dict[str, Any]
    cases: tuple[Result, ...]


def write(path: Path, results: Iterable[Result], settings: Settings) -> None:
    """Keep results in a file."""
    table = _Table(_setting(settings), tuple(results))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def read(path: Path, settings: Settings) -> list[Result]:
    """What ``write`` kept, nothing if there is no file.

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


def _setting(settings: Settings) -> dict[str, Any]:
    return {
        "nodes": settings.nodes,
        "protect": settings.protect,
        "ranks_per_node": settings.ranks_per_node,
        "seed": settings.seed,
        "command": list(settings.command),
    }
