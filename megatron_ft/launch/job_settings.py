"""The settings that the supervisor uses: from its flags, the training command, the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.config import (
    SETTINGS,
    SWITCH,
    SnapshotConfig,
    Source,
    differences,
    environment_source,
    resolve,
)
from megatron_ft.errors import ConfigError
from megatron_ft.flags import read_command

SHARED = tuple(setting for setting in SETTINGS.values() if setting.job)
"""Settings that ``megatron-ft run`` has flags for."""


def settle(
    run_flags: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str]
) -> SnapshotConfig:
    """One configuration from ``megatron-ft run``'s parsed flags and the training command.

    What no flag gives comes from ``MEGATRON_FT_*`` variables, then from the defaults.  Says on
    stderr when the command has ``--inmem-*`` flags that do nothing.  Raises ConfigError for
    unknown flags, bad values, and for flags that contradict each other, naming both.
    """
    ours = Source(
        {setting.name: run_flags.get(setting.name) for setting in SHARED},
        lambda name: f"`megatron-ft run {SETTINGS[name].run_flag}`",
    )
    theirs = read_command(command)
    _refuse_contradictions(ours, theirs.source)
    settings = resolve(ours, theirs.source, environment_source(environment))
    if theirs.without_effect:
        print(
            f"megatron-ft: warning: the training command has {', '.join(theirs.without_effect)} "
            f"but not {SWITCH}: without it Megatron takes no snapshots and nothing is protected",
            file=sys.stderr,
            flush=True,
        )
    return settings


def _refuse_contradictions(ours: Source, theirs: Source) -> None:
    found = differences(ours, theirs)
    if found:
        lines = "".join(f"\n  {line}" for line in found.values())
        raise ConfigError(
            f"flags before and after `--` contradict each other; give each in one place:{lines}"
        )
