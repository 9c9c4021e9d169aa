"""The places where settings are given, and which of them counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.problems import nearest, refuse
from megatron_ft.config.setting import Setting
from megatron_ft.config.table import SETTINGS
from megatron_ft.core.errors import ConfigError


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
