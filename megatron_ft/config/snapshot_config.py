"""Makes a job's settings from what is given, and checks them as a whole.

The words with which wrong settings are refused.

The places where settings are given, and which of them counts.

A job's settings together: made from what is given, checked as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from megatron_ft.config.setting import Setting
from megatron_ft.config.settings import SETTINGS, Settings
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import SHRINK


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


@dataclass(frozen=True)
class Source:
    """What one place says about settings, by name; ``label`` tells people where it stands.

    None and empty text count as not given.
    """

    values: Mapping[str, Any]
    label: Callable[[str], str]

    @property
    def given(self) -> dict[str, Any]:
        """Only what is given."""
        return {n: v for n, v in self.values.items() if v is not None and v != ""}


def environment_source(environment: Mapping[str, str] | None = None) -> Source:
    """Environment variables of settings as a source; other variables are not looked at."""
    variables = os.environ if environment is None else environment
    return Source(
        {name: variables.get(setting.variable) for name, setting in SETTINGS.items()},
        lambda name: SETTINGS[name].variable,
    )


def first_given(*sources: Source) -> dict[str, Any]:
    """Each setting's value from the first source that gives it, converted to its type.

    Raises one ConfigError that lists every unknown name and every bad value, with the
    place where it stands.
    """
    values: dict[str, Any] = {}
    problems = []
    for source in sources:
        for name, value in source.given.items():
            try:
                parsed = _known(name, source.label).parse(value, source.label(name))
                values.setdefault(name, parsed)
            except ConfigError as error:
                problems.append(str(error))
    refuse(problems)
    return values


def differences(ours: Source, theirs: Source) -> dict[str, str]:
    """Settings to which two sources give different values, each with a line that says so.

    Only None counts as not given here: empty text is the word for "none".  Raises ConfigError
    for a value that does not convert.
    """
    lines = {}
    for name, setting in SETTINGS.items():
        mine, other = ours.values.get(name), theirs.values.get(name)
        if mine is None or other is None:
            continue
        if setting.parse(mine, ours.label(name)) != setting.parse(other, theirs.label(name)):
            said = other if other != "" else setting.shown_default
            lines[name] = f"{ours.label(name)} is {mine}, but {theirs.label(name)} is {said}"
    return lines


def _known(name: str, label: Callable[[str], str]) -> Setting:
    if name not in SETTINGS:
        raise ConfigError(f"unknown setting {name!r}; {nearest(name, SETTINGS)}")
    return SETTINGS[name]


DRAIN_ONLY = (
    "drain_interval",
    "drain_keep",
    "drain_keep_every",
    "drain_bandwidth_mib",
    "drain_export_dir",
    "drain_stop_seconds",
    "export_on_failure",
    "time_limit_seconds",
)
"""Settings that do nothing without drain_dir."""


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(Settings):
    """Settings of a job's snapshots; immutable, checked when it is made.

    Megatron flags are ``--inmem-<name with dashes>``; environment variables are
    ``MEGATRON_FT_<NAME>``.  Values out of range raise one ConfigError that lists all of them.
    """

    def __post_init__(self) -> None:
        problems = []
        for name, setting in SETTINGS.items():
            try:
                object.__setattr__(self, name, setting.parse(getattr(self, name), name))
            except ConfigError as error:
                problems.append(str(error))
        refuse(problems + self._without_effect())

    def _without_effect(self) -> list[str]:
        """Settings of a drain without folder or interval: whoever gave them expects files."""
        if self.on_no_spare == SHRINK and None in (self.drain_dir, self.drain_export_dir):
            return [
                "on_no_spare is shrink, which goes on from an export: give drain_dir, "
                "drain_interval and drain_export_dir, the folder that the training command loads"
            ]
        if self.drain_dir is not None:
            never = f"drain_dir is {self.drain_dir}, but drain_interval is 0: nothing is written"
            return [] if self.drain_interval else [f"{never}; give both"]
        return [
            f"{name} is {getattr(self, name)}, but there is no drain_dir to write to; give both"
            for name in DRAIN_ONLY
            if getattr(self, name) != SETTINGS[name].default
        ]

    @property
    def fixed_interval(self) -> int:
        """Iterations between snapshots, 0 where the job finds it out."""
        return 0 if isinstance(self.snapshot_interval, str) else self.snapshot_interval

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SnapshotConfig:
        """Settings from names and values, text converted to each setting's type.

        Raises ConfigError for unknown names (with the nearest right ones) and for values
        that do not convert, all at once.
        """
        return resolve(Source(values, str))

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> SnapshotConfig:
        """Settings from ``MEGATRON_FT_<NAME>`` variables; what is not set keeps its default."""
        return resolve(environment_source(environment))

    def job_variables(self) -> dict[str, str]:
        """The environment variables by which trainers learn what the supervisor uses."""
        values = {s.variable: getattr(self, s.name) for s in SETTINGS.values() if s.job}
        return {name: "" if value is None else str(value) for name, value in values.items()}


def resolve(*sources: Source) -> SnapshotConfig:
    """Each setting from the first source that gives it, else its default.

    Raises one ConfigError that lists every unknown name and every bad value, with the
    place where it stands.
    """
    return SnapshotConfig(**first_given(*sources))
