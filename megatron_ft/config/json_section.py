"""The section ``"inmem_snapshot": {...}`` of a JSON configuration such as DeepSpeed's.

Its keys are ``enabled``, the settings of :mod:`megatron_ft.config` under their own names,
``client_state`` and ``follows_engine``.  JSON has types, so they are asked for: a number is not a
text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ft.config import SETTINGS, Source, nearest, refuse
from megatron_ft.core.errors import ConfigError

SECTION = "inmem_snapshot"
ENABLED, CLIENT_STATE, FOLLOWS_ENGINE = "enabled", "client_state", "follows_engine"
CONSTANT = "constant"
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""The counters of the engine that an entry of ``client_state`` may follow, if not CONSTANT."""

_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
"""The last one is followed by a file in some programs, and a switch in others."""

_ALIKE = 0.85
"""The share of a key that must be the section's."""

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"integer": (int,), "number": (int, float), "string": (str,)}
)


@dataclass(frozen=True)
class Section:
    """A section that was found: whether it switches snapshots on, what it sets, which entries
    of the script's client_state count what, and whether the script follows the engine's step (None:
    it does not say)."""

    enabled: bool
    source: Source
    client_state: Mapping[str, str]
    follows_engine: bool | None = None


def read_section(config: Mapping[str, Any], place: str = "the DeepSpeed config") -> Section | None:
    """The section of a parsed configuration, None if it has none.

    ``place`` names the configuration in messages.  Raises one ConfigError that lists every
    unknown key with the nearest right one, and every value of a wrong type; also for a key that
    is nearly the section's, as DeepSpeed passes over those that it does not know.
    """
    if SECTION not in config:
        refuse([f'{place} has a key "{name}"; did you mean {SECTION}?' for name in _alike(config)])
        return None
    section = config[SECTION]
    if not isinstance(section, Mapping):
        raise ConfigError(f'{place}: "{SECTION}" is {_shown(section)}; give {{"{ENABLED}": true}}')
    where = f"{place}: {SECTION}"
    refuse(_problems(section, where))
    return Section(
        section.get(ENABLED, False),
        Source({n: section.get(n) for n in SETTINGS}, lambda name: f"{where}.{name}"),
        section.get(CLIENT_STATE, {}),
        section.get(FOLLOWS_ENGINE),
    )


def read_command(command: Sequence[str]) -> Section | None:
    """The section in the JSON file that a training command names, None if there is none.

    Looked at are ``--deepspeed_config FILE`` and ``--deepspeed FILE``.  A file that is not
    there is left to the training program.  ConfigError if one cannot be read as JSON.
    """
    for word, after in itertools.pairwise([*command, ""]):
        flag, _, value = word.partition("=")
        path = Path(value or after)
        if flag not in _FLAGS or path.suffix != ".json" or not path.is_file():
            continue
        try:
            # As DeepSpeed reads it, whatever the locale.
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        return read_section(parsed if isinstance(parsed, Mapping) else {}, str(path))
    return None


def _alike(config: Mapping[str, Any]) -> list[str]:
    """Keys that are meant to be the section's.

    They begin as it does: others may be another tool's (mem_snapshot), or are commented out with
    a sign (_, #, //).
    """
    names = {str(name).lower(): str(name) for name in config}
    names = {lower: name for lower, name in names.items() if lower[:1] == SECTION[0]}
    return [names[name] for name in get_close_matches(SECTION, names, cutoff=_ALIKE)]


def _problems(section: Mapping[str, Any], where: str) -> list[str]:
    known = [ENABLED, CLIENT_STATE, FOLLOWS_ENGINE, *SETTINGS]
    found = [
        f'{where} has an unknown key "{name}"; {nearest(str(name), known)}'
        for name in section
        if name not in known
    ]
    for name in (ENABLED, FOLLOWS_ENGINE):
        if not isinstance(section.get(name, False), bool):
            found.append(f"{where}.{name} is {_shown(section[name])}; give true or false")
    found += _client_state_problems(section.get(CLIENT_STATE, {}), f"{where}.{CLIENT_STATE}")
    for name, setting in SETTINGS.items():
        value = section.get(name)
        right = any(isinstance(value, _PYTHON_TYPES[t]) for t in setting.kind.json_types)
        if value is not None and (not right or isinstance(value, bool)):
            found.append(f"{where}.{name} is {_shown(value)}; give {setting.allowed}")
        elif value is not None:
            try:
                setting.parse(value, f"{where}.{name}")
            except ConfigError as error:
                found.append(str(error))
    return found


def _client_state_problems(value: Any, where: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f'{where} is {_shown(value)}; give for example {{"step": "{COUNTERS[0]}"}}']
    return [
        f"{where}.{name} is {_shown(counter)}; {nearest(str(counter), [*COUNTERS, CONSTANT])}"
        for name, counter in value.items()
        if counter not in (*COUNTERS, CONSTANT)
    ]


def _shown(value: Any) -> str:
    """A value as JSON text; a configuration made in Python may hold other objects."""
    return json.dumps(value, default=repr)
