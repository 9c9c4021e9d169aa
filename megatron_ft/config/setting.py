"""What is known of one setting, and the names it has in flags, variables and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.core.background import parse_cpus, shown
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme

ENVIRONMENT_PREFIX = "MEGATRON_FT_"
FLAG_PREFIX = "--inmem-"

AUTO = "auto"
"""In place of a number: found out while the job runs."""


@dataclass(frozen=True)
class Kind:
    """A type of values: its name for people and how text or a number becomes one.

    ``convert`` raises ValueError for what is not of this kind.  ``json_types`` are what JSON
    calls it.
    """

    name: str
    convert: Callable[[Any], Any]
    json_types: tuple[str, ...]


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or number != float(value):
        raise ValueError(value)
    return number


def _interval(value: Any) -> int | str:
    return AUTO if value == AUTO else _whole(value)


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
        raise ConfigError(f"there is no user whose home that could be ({error})") from error
    # It travels in messages and notes.
    if not _is_text(str(folder)):
        raise ConfigError("a folder's name must be UTF-8, without NUL; rename it, or link to it")
    return folder


def _is_text(name: str) -> bool:
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


WHOLE = Kind("a whole number", _whole, ("integer",))
INTERVAL = Kind("a whole number, or auto", _interval, ("integer", "string"))
NUMBER = Kind("a finite number", _number, ("number",))
FOLDER = Kind("a folder", _folder, ("string",))
WORD = Kind("a word", str, ("string",))
CPUS = Kind("a list of CPUs", lambda value: shown(parse_cpus(str(value))), ("string",))
SCHEME = Kind("a redundancy scheme", lambda value: str(Scheme.parse(str(value))), ("string",))


@dataclass(frozen=True)
class Setting:
    """One setting: its meaning, its values, and whether the supervisor needs it.

    ``allowed`` says in words what ``accepts`` checks.  A setting with ``job`` set is used by the
    supervisor, so trainers must have been told the same.  A default of None means "none".
    """

    name: str
    kind: Kind
    default: Any
    help: str
    unit: str
    allowed: str
    accepts: Callable[[Any], bool]
    job: bool

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
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """The default for help texts."""
        return "none" if self.default is None else str(self.default)

    def parse(self, value: Any, label: str) -> Any:
        """The value of this setting's kind; None and empty text give the default.

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
