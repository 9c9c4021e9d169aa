#!/usr/bin/env python3
"""Write the table of --inmem flags in docs/megatron.md from megatron_ft/config.py.

scripts/flags_table.py          # writes it
scripts/flags_table.py --check  # exit code 1 if what is written there is old
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ft.config import SETTINGS, SWITCH, SWITCH_HELP
from megatron_ft.setting import Setting

PAGE = Path(__file__).parents[1] / "docs" / "megatron.md"
BEGIN = "<!-- flags: written by scripts/flags_table.py -->"
END = "<!-- end of flags -->"


def table() -> str:
    """The table in Markdown: the switch, then every setting in the order of the class."""
    rows = [("flag", "values", "default", "run", "meaning"), ("---",) * 5]
    rows.append((f"`{SWITCH}`", "", "off", "", SWITCH_HELP))
    rows += [_row(setting) for setting in SETTINGS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with(text: str, new_table: str) -> str:
    """The page with its table replaced.  ValueError if a mark is not there exactly once."""
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"{PAGE} needs the line {mark!r} once, it has it {text.count(mark)}x")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new_table}\n{END}{rest.split(END)[1]}"


def _row(setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit and setting.default is not None else ""
    return (
        f"`{setting.flag}`",
        setting.allowed,
        f"{setting.shown_default}{unit}",
        "yes" if setting.job else "",
        setting.help,
    )


def main() -> int:
    """Write or check; the exit code."""
    old = PAGE.read_text()
    new = page_with(old, table())
    if sys.argv[1:] == ["--check"]:
        if new != old:
            print(f"{PAGE}: the table of flags is old; run scripts/flags_table.py")
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
