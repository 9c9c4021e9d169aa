"""How a field of a settings class says what it is: kind, default, meaning, allowed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from megatron_ft.config.setting import FOLDER, NUMBER, WHOLE, WORD, Kind, Setting


def setting(
    kind: Kind,
    default: Any,
    help_text: str,
    *,
    allowed: str = "",
    accepts: Callable[[Any], bool] = lambda value: True,
    unit: str = "",
    job: bool = False,
) -> Any:
    """A field with a :class:`Setting` behind it, whose name is the field's."""
    described = Setting("", kind, default, help_text, unit, allowed or kind.name, accepts, job)
    return field(default=default, metadata={"setting": described})


def whole(default: int, help_text: str, least: int, unit: str, job: bool = False) -> Any:
    """A whole number of at least ``least``."""
    allowed = f"a whole number >= {least}"
    return setting(
        WHOLE, default, help_text, allowed=allowed, accepts=lambda v: v >= least, unit=unit, job=job
    )


def seconds(default: float, help_text: str, job: bool = False) -> Any:
    """A time that is never zero."""
    return setting(
        NUMBER,
        default,
        help_text,
        allowed="seconds > 0",
        accepts=lambda v: v > 0,
        unit="seconds",
        job=job,
    )


def seconds_or_never(default: float, help_text: str) -> Any:
    """A time of the job, with zero for never."""
    return setting(
        NUMBER,
        default,
        help_text,
        allowed="seconds >= 0",
        accepts=lambda v: v >= 0,
        unit="seconds",
        job=True,
    )


def bandwidth(help_text: str) -> Any:
    """A node's limit on traffic of one kind; there is none by default."""
    return setting(
        NUMBER,
        0.0,
        f"{help_text} 0: no limit.",
        allowed="MiB a second >= 0",
        accepts=lambda v: v >= 0,
        unit="MiB/s",
        job=True,
    )


def folder(help_text: str) -> Any:
    """A folder of the job's that need not be given."""
    return setting(FOLDER, None, help_text, job=True)


def one_of(words: tuple[str, ...], help_text: str) -> Any:
    """One of several words for the job, the first by default."""
    *others, last = words
    allowed = f"{', '.join(others)} or {last}"
    return setting(
        WORD, words[0], help_text, allowed=allowed, accepts=lambda v: v in words, job=True
    )
