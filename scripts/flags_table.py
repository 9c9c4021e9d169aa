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

from megatron_ft.config import SETTINGS, SWITCH, SWITCH_HELP
from megatron_ft.config.json_section import (
    CLIENT_STATE,
    CLIENT_STATE_HELP,
    ENABLED,
    FOLLOWS_ENGINE,
    FOLLOWS_ENGINE_HELP,
    schema,
)
from megatron_ft.config.setting import Setting

ROOT = Path(__file__).parents[1]
MEGATRON = ROOT / "docs" / "megatron.md"
DEEPSPEED = ROOT / "docs" / "deepspeed.md"
SCHEMA = ROOT / "deepspeed_ext" / "inmem_snapshot.schema.json"
BEGIN = "<!-- settings: written by scripts/flags_table.py -->"
END = "<!-- end of settings -->"


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
