"""The ``--inmem-*`` flags: added to a parser, read out of a command, held against the job's.

Adding and reading use one argparse group, so the supervisor reads a training command exactly as
the training program will.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_ft.config import (
    SETTINGS,
    SWITCH,
    SWITCH_HELP,
    Source,
    differences,
    environment_source,
    nearest,
    refuse,
)
from megatron_ft.config.setting import FLAG_PREFIX, FOLDER, Setting
from megatron_ft.core.environment import JOB
from megatron_ft.core.errors import ConfigError


def attribute_of(name: str) -> str:
    """Name of a setting's attribute on the parsed arguments."""
    return "inmem_" + name


def add_flags(group: Any) -> None:
    """Add the switch and one flag a setting to an argparse parser or group.

    What is not given is None, so that an environment variable can fill it.
    Raises argparse.ArgumentError if they are there already.
    """
    group.add_argument(SWITCH, action="store_true", help=SWITCH_HELP)
    for setting in SETTINGS.values():
        group.add_argument(
            setting.flag,
            type=argument_type(setting),
            default=None,
            metavar=setting.metavar,
            help=help_of(setting),
        )


def help_of(setting: Setting) -> str:
    """The text that ``--help`` shows: meaning, allowed values, unit, default."""
    known = [] if setting.kind is FOLDER else [setting.allowed]
    if setting.default is not None:
        known.append(f"default: {setting.shown_default} {setting.unit}".rstrip())
    text = f"{setting.help} ({'; '.join(known)})" if known else setting.help
    return text.replace("%", "%%")


def argument_type(setting: Setting) -> Callable[[str], Any]:
    """A converter for argparse.  Numbers stay numbers; all else is text in its normal form,
    because Megatron stores its arguments in checkpoints, which must not hold our types."""

    def convert(text: str) -> Any:
        try:
            value = setting.kind.convert(text)
        except ValueError as error:
            known = isinstance(error, ConfigError)
            reason = str(error) if known else f"{text!r}; give {setting.allowed}"
            raise argparse.ArgumentTypeError(reason) from error
        return value if isinstance(value, int | float) else str(value)

    return convert


def flag_source(arguments: Any) -> Source:
    """The ``--inmem-*`` values of parsed arguments; attributes that are missing count as not
    given."""
    values = {name: getattr(arguments, attribute_of(name), None) for name in SETTINGS}
    return Source(values, lambda name: SETTINGS[name].flag)


@dataclass(frozen=True)
class CommandFlags:
    """The ``--inmem-*`` flags of a training command.  ``enabled``: the switch is among them."""

    enabled: bool
    source: Source

    @property
    def without_effect(self) -> list[str]:
        """Flags that do nothing because the switch is missing."""
        return [] if self.enabled else [self.source.label(name) for name in self.source.given]


def read_command(command: Sequence[str]) -> CommandFlags:
    """The ``--inmem-*`` flags in a command line, as ``--flag value`` or ``--flag=value``.

    The last of several counts.  Raises ConfigError for unknown ``--inmem-*`` flags, with the
    nearest right ones, for missing values and for values that do not convert.
    """
    # A wrapper of the training program may use "--" itself; flags follow it all the same.
    words = [word for word in command if word != "--"]
    # As Megatron's own parser: no abbreviations.
    reader = _Reader(prog="", usage="", add_help=False, allow_abbrev=False)
    add_flags(reader)
    parsed, rest = reader.parse_known_args(words)
    known = [SWITCH, *(setting.flag for setting in SETTINGS.values())]
    unknown = [word.partition("=")[0] for word in rest if word.startswith(FLAG_PREFIX)]
    refuse([f"unknown flag {flag}; {nearest(flag, known, FLAG_PREFIX)}" for flag in unknown])
    return CommandFlags(parsed.inmem_snapshot, flag_source(parsed))


class _Reader(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"in the training command: {message}")


def job_contradictions(
    given: Source, blindness: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Settings of the job that differ from what the supervisor uses, one line each.

    The supervisor's choice is in environment variables; ``blindness`` completes
    "`megatron-ft run`, which ..." and explains why it did not see what is ``given`` here.
    Outside ``megatron-ft run`` there is nothing to contradict.
    """
    variables = os.environ if environment is None else environment
    if JOB not in variables:
        return []
    shared = {name: value for name, value in given.given.items() if SETTINGS[name].job}
    used = environment_source(variables).values
    # The supervisor sets an empty variable where it uses none.
    choice = {name: used[name] for name in shared if used[name] is not None}
    return [
        f"{line}; give it as {SETTINGS[name].flag} or {SETTINGS[name].run_flag} in the command "
        f"line of `megatron-ft run`, which {blindness}"
        for name, line in differences(
            Source(shared, given.label),
            Source(choice, lambda name: f"the supervisor's {SETTINGS[name].run_flag}"),
        ).items()
    ]
