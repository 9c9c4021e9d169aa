#!/usr/bin/env python3
"""Write what docs and the JSON schema say of the settings, from megatron_ft/config/.

scripts/flags_table.py          # writes the tables in docs/ and the schema of the JSON section
scripts/flags_table.py --check  # exit code 1 if what is written there is old
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config import SETTINGS, SWITCH, SWITCH_HELP
from megatron_ft.config.json_section import (
    CLIENT_STATE,
    CONSTANT,
    COUNTERS,
    ENABLED,
    FOLLOWS_ENGINE,
    SECTION,
)
from megatron_ft.config.setting import Setting

ROOT = Path(__file__).parents[1]
MEGATRON = ROOT / "docs" / "how-to" / "megatron.md"
DEEPSPEED = ROOT / "docs" / "how-to" / "deepspeed.md"
SCHEMA = ROOT / "deepspeed_ext" / "inmem_snapshot.schema.json"
BEGIN = "<!-- settings: written by scripts/flags_table.py -->"
END = "<!-- end of settings -->"

CLIENT_STATE_HELP = (
    "Entries of the script's client_state by name, each with the engine's counter that it follows "
    f"({', '.join(COUNTERS)}) or {CONSTANT}: so they can be told for any step."
)

FOLLOWS_ENGINE_HELP = (
    "The script calls engine.load_checkpoint at every start, and its loop, its data and all else "
    "that it keeps outside the engine follow from engine.global_steps or from the client_state. "
    "Without this, or a declared client_state, a restart uses no snapshot."
)


def flags() -> str:
    """Megatron's flags in Markdown: the switch, then every setting in the order of the class."""
    switch = (f"`{SWITCH}`", "", "off", "", SWITCH_HELP)
    return _table("flag", [switch, *(_row(setting.flag, setting) for setting in SETTINGS.values())])


def keys() -> str:
    """The keys of the JSON section in Markdown."""
    switch = (f"`{ENABLED}`", "true or false", "false", "", SWITCH_HELP)
    state = (f"`{CLIENT_STATE}`", "names and counters", "none", "", CLIENT_STATE_HELP)
    follows = (f"`{FOLLOWS_ENGINE}`", "true or false", "false", "", FOLLOWS_ENGINE_HELP)
    settings = [_row(setting.name, setting) for setting in SETTINGS.values()]
    return _table("key", [switch, *settings, state, follows])


def schema() -> dict[str, Any]:
    """The JSON schema of the section."""
    properties: dict[str, Any] = {
        ENABLED: {"type": "boolean", "default": False, "description": SWITCH_HELP},
        CLIENT_STATE: {
            "type": "object",
            "additionalProperties": {"enum": [*COUNTERS, CONSTANT]},
            "description": CLIENT_STATE_HELP,
        },
        FOLLOWS_ENGINE: {"type": "boolean", "default": False, "description": FOLLOWS_ENGINE_HELP},
    }
    for setting in SETTINGS.values():
        properties[setting.name] = {
            "type": _json_type(setting),
            "default": setting.default,
            "description": f"{setting.help} Give {setting.allowed}.",
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SECTION,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _json_type(setting: Setting) -> str | list[str]:
    types = [*setting.kind.json_types] + ["null"] * (setting.default is None)
    return types if len(types) > 1 else types[0]


def page_with(page: Path, new_table: str) -> str:
    """The page with its table replaced.  ValueError if a mark is not there exactly once."""
    text = page.read_text()
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"{page} needs the line {mark!r} once, it has it {text.count(mark)}x")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new_table}\n{END}{rest.split(END)[1]}"


def _table(first: str, rows: Sequence[Sequence[str]]) -> str:
    head = [(first, "values", "default", "run", "meaning"), ("---",) * 5]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def _row(name: str, setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit and setting.default is not None else ""
    return (
        f"`{name}`",
        setting.allowed,
        f"{setting.shown_default}{unit}",
        "yes" if setting.job else "",
        setting.help,
    )


def main() -> int:
    """Write or check; the exit code."""
    files = {
        MEGATRON: page_with(MEGATRON, flags()),
        DEEPSPEED: page_with(DEEPSPEED, keys()),
        SCHEMA: json.dumps(schema(), indent=2) + "\n",
    }
    old = [path for path, text in files.items() if path.read_text() != text]
    for path in old:
        if sys.argv[1:] == ["--check"]:
            print(f"{path} is old; run scripts/flags_table.py")
        else:
            path.write_text(files[path])
    return int(bool(old) and sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    sys.exit(main())
