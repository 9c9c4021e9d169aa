"""The declaration of one setting: its values, its meaning, and its names everywhere.

A setting is a field of :class:`megatron_ft.config.SnapshotConfig`.  The functions at the end of
this module make such fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme

ENVIRONMENT_PREFIX = "MEGATRON_FT_"
FLAG_PREFIX = "--inmem-"

AUTO = "auto"
"""Stands for a number that is found out while the job runs."""


@dataclass(frozen=True)
class ValueType:
    """A type of values: its name for people and how text or a number becomes one.

    ``convert`` raises ValueError for what is not of this type.  ``json_types`` are what JSON
    calls it, ``metavar`` is its word in help texts.
    """

    name: str
    metavar: str
    convert: Callable[[Any], Any]
    json_types: tuple[str, ...]


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or number != float(value):
        raise ValueError(value)
    return number


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(value)
    return number


def _folder(value: Any) -> Path:
    # Absolute, since the supervisor and its trainers may have different working directories.
    try:
        folder = Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"its ~ names no user of this machine ({error})") from error
    try:
        travels = b"\0" not in str(folder).encode()
    except UnicodeEncodeError:
        travels = False
    if not travels:  # in messages and notes
        raise ConfigError("a folder's name must be UTF-8, without NUL; rename it, or link to it")
    return folder


WHOLE = ValueType("a whole number", "N", _whole, ("integer",))
INTERVAL = ValueType(
    "a whole number, or auto",
    "N|auto",
    lambda value: AUTO if value == AUTO else _whole(value),
    ("integer", "string"),
)
NUMBER = ValueType("a finite number", "X", _number, ("number",))
FOLDER = ValueType("a folder", "DIR", _folder, ("string",))
WORD = ValueType("a word", "WORD", str, ("string",))
SCHEME = ValueType(
    "a redundancy scheme", "SCHEME", lambda value: str(Scheme.parse(str(value))), ("string",)
)


@dataclass(frozen=True)
class Setting:
    """One setting: its meaning, its values, and who uses it.

    ``allowed`` says in words what ``accepts`` checks.  A setting with ``job`` set is used by the
    supervisor, so trainers must be given the same.  One with ``needs_drain_dir`` does
    nothing without that folder.  A default of None means "none".
    """

    name: str
    kind: ValueType
    default: Any
    help: str
    unit: str
    allowed: str
    accepts: Callable[[Any], bool]
    job: bool
    needs_drain_dir: bool

    @property
    def flag(self) -> str:
        """The framework's flag: ``snapshot_interval`` has ``--inmem-snapshot-interval``."""
        return FLAG_PREFIX + self.name.replace("_", "-")

    @property
    def run_flag(self) -> str:
        """The flag of ``megatron-ft run``, for settings of the job."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        """The word that stands for a value in help texts: its unit, or its kind."""
        return self.unit.upper() if self.kind is NUMBER and self.unit else self.kind.metavar

    @property
    def shown_default(self) -> str:
        return "none" if self.default is None else str(self.default)

    def parse(self, value: Any, label: str) -> Any:
        """The value of this setting's type; None and empty text give the default.

        Raises ConfigError that begins with ``label``, the place where the value was given.
        """
        if value is None or value == "":
            return self.default
        try:
            parsed = self.kind.convert(value)
        except ConfigError as error:
            raise ConfigError(f"{label} is {value}: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{label} is {value!r}; give {self.allowed}") from error
        if not self.accepts(parsed):
            raise ConfigError(f"{label} is {value}; give {self.allowed}")
        return parsed


def setting(
    kind: ValueType,
    default: Any,
    help_text: str,
    *,
    allowed: str = "",
    accepts: Callable[[Any], bool] = lambda value: True,
    unit: str = "",
    job: bool = True,
    needs_drain_dir: bool = False,
) -> Any:
    """A dataclass field with a :class:`Setting` behind it, whose name is the field's."""
    described = Setting(
        "", kind, default, help_text, unit, allowed or kind.name, accepts, job, needs_drain_dir
    )
    return field(default=default, metadata={"setting": described})


def whole(default: int, help_text: str, least: int, unit: str, **more: Any) -> Any:
    """A whole number of at least ``least``."""
    return setting(
        WHOLE,
        default,
        help_text,
        allowed=f"a whole number >= {least}",
        accepts=lambda v: v >= least,
        unit=unit,
        **more,
    )


def number(
    default: float,
    help_text: str,
    unit: str,
    *,
    least: float = 0.0,
    above: float = -math.inf,
    most: float = math.inf,
    **more: Any,
) -> Any:
    """A finite number of at least ``least``, greater than ``above``, at most ``most``."""
    allowed = f"{unit} > {above:g}" if above >= least else f"{unit} >= {least:g}"
    return setting(
        NUMBER,
        default,
        help_text,
        allowed=allowed if most == math.inf else f"{allowed}, at most {most:g}",
        accepts=lambda v: least <= v <= most and v > above,
        unit=unit,
        **more,
    )


def seconds(default: float, help_text: str, *, never: bool = False, **more: Any) -> Any:
    """A time above zero; with ``never`` zero is allowed, and means that."""
    return number(default, help_text, "seconds", above=-math.inf if never else 0.0, **more)


def bandwidth(help_text: str, **more: Any) -> Any:
    """A node's limit on traffic of one kind; there is none by default."""
    return number(0.0, f"{help_text} 0: no limit.", "MiB/s", **more)


def folder(help_text: str, **more: Any) -> Any:
    return setting(FOLDER, None, help_text, **more)


def one_of(words: tuple[str, ...], help_text: str) -> Any:
    """One of several words, the first by default."""
    *others, last = words
    allowed = f"{', '.join(others)} or {last}"
    return setting(WORD, words[0], help_text, allowed=allowed, accepts=lambda v: v in words)
