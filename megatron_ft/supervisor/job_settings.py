"""The settings that the supervisor uses: from its flags, the training command, the environment."""

from __future__ import annotations

import itertools
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
    json_section,
    resolve,
)
from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ConfigError

SHARED = tuple(setting for setting in SETTINGS.values() if setting.job)
"""Settings that ``megatron-ft run`` has flags for."""


def settle(
    run_flags: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str]
) -> SnapshotConfig:
    """One configuration from ``megatron-ft run``'s parsed flags and the training command.

    The command may have ``--inmem-*`` flags, or name a JSON file with our section.  What none
    of them gives comes from ``MEGATRON_FT_*`` variables, then from the defaults.  Says on
    stderr what is given without being switched on.  Raises ConfigError for unknown names, bad
    values, and for places that contradict each other, naming both.
    """
    ours = Source(
        {setting.name: run_flags.get(setting.name) for setting in SHARED},
        lambda name: f"`megatron-ft run {SETTINGS[name].run_flag}`",
    )
    flags, section = read_command(command), json_section.read_command(command)
    sources = [ours, flags.source]
    if section is not None and section.enabled:
        sources.append(section.source)
    _refuse_contradictions(sources)
    settings = resolve(*sources, environment_source(environment))
    if flags.without_effect and not (section is not None and section.enabled):
        _warn(
            f"the training command has {', '.join(flags.without_effect)} but not {SWITCH}: "
            "without it Megatron takes no snapshots and nothing is protected"
        )
    if section is not None and not section.enabled and section.source.given:
        label = section.source.label(json_section.ENABLED)
        _warn(f"{label} is not true: DeepSpeed takes no snapshots and nothing is protected")
    return settings


def _warn(text: str) -> None:
    print(f"megatron-ft: warning: {text}", file=sys.stderr, flush=True)


def _refuse_contradictions(sources: Sequence[Source]) -> None:
    pairs = itertools.combinations(sources, 2)
    found = [line for left, right in pairs for line in differences(left, right).values()]
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ConfigError(f"these settings contradict each other; give each in one place:{lines}")
