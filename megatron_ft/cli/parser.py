"""The parser of one subcommand: grouped help, and errors of one line that name the nearest flag."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

HELP_ALL = "--help-all"


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of one subcommand; bad ones end the process with exit code 2.

    Flags cannot be abbreviated: a new flag would change the meaning of an old command.
    ``everything``: help shows the flags that few need, too.
    """

    def __init__(self, *, everything: bool = False, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **settings)
        self.everything = everything
        self.register("type", int, _whole_number)
        self.register("type", float, _finite_number)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """The arguments, all of which are known."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            word = rest[0].partition("=")[0]
            near = suggestion(word, self._option_string_actions)
            flag = word.startswith("-")
            self.error(
                f"there is no flag {word}{near}" if flag else f"unexpected argument {rest[0]!r}"
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        """End the process with the message on one line."""
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"megatron-ft: error: {message}{see} `{self.prog} --help`\n")


def for_few(parser: argparse.ArgumentParser, text: str) -> str:
    """The help of a flag that few need: shown by ``--help-all`` only."""
    return text if getattr(parser, "everything", True) else argparse.SUPPRESS


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest known word, empty where none is near."""
    plain = word.replace("_", "-").replace("--inmem-", "--")
    near = get_close_matches(plain, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def seconds(text: str) -> float:
    """A time above 0 from the command line."""
    if (found := _finite_number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return found


def _finite_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number
