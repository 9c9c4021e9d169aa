"""The words with which wrong settings are refused."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from megatron_ft.core.errors import ConfigError


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with the problems, if there are any: one a line when several."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} settings are wrong:{lines}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint for a name that is not known: the nearest one, else all of them.

    ``prefix`` is common to all and tells nothing about which one was meant.
    """
    rest = [candidate.removeprefix(prefix) for candidate in known]
    near = get_close_matches(name.removeprefix(prefix), rest, n=1)
    names = ", ".join(prefix + candidate for candidate in near or rest)
    return f"did you mean {names}?" if near else f"known: {names}"
