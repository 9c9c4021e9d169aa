"""How a probe's answer comes back: one marked line of JSON among whatever else a log holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MARK = "MEGATRON-FT-DOCTOR "

T = TypeVar("T")


def say(value: Any) -> None:
    """Print an answer."""
    print(MARK + msgspec.json.encode(value).decode(), flush=True)


def answers(log: Path, kind: type[T]) -> Iterator[T]:
    """All answers of one kind in a log; lines of others, and half lines, are left out."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if mark:
            try:
                yield msgspec.json.decode(rest, type=kind)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue


def last_words(log: Path) -> str:
    """The end of what a process printed besides answers, for an error message."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    return " | ".join(lines[-3:])[-400:] or "it printed nothing"
