#!/usr/bin/env python3
"""Write the generated pages of the documentation and the schema of the JSON section.

scripts/flags_table.py          # writes them
scripts/flags_table.py --check  # exit code 1 if one of them is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import compatibility_table

from megatron_ft.cli.main import COMMANDS, Command
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
from megatron_ft.supervisor.metrics import METRICS, PREFIX

ROOT = Path(__file__).parents[1]
SETTINGS_PAGE = ROOT / "docs" / "reference" / "settings.md"
COMMANDS_PAGE = ROOT / "docs" / "reference" / "command-line.md"
METRICS_PAGE = ROOT / "docs" / "reference" / "metrics.md"
COMPATIBILITY_PAGE = ROOT / "docs" / "reference" / "compatibility.md"
SCHEMA = ROOT / "deepspeed_ext" / "inmem_snapshot.schema.json"
BEGIN = "<!-- written by scripts/flags_table.py -->"
END = "<!-- end of what scripts/flags_table.py writes -->"

_RUN = next(command for command in COMMANDS if command.name == "run")

CLIENT_STATE_HELP = (
    "Entries of the script's client_state by name, each with the engine's counter that it follows "
    f"({', '.join(COUNTERS)}) or {CONSTANT}. A restart computes their values for its step."
)

FOLLOWS_ENGINE_HELP = (
    "The script's loop, its data and all else that it keeps outside the engine follow from "
    "engine.global_steps or from the client_state; it loads at every start, or reads its data from "
    "a loader that snapshots know. Without this, or a declared client_state, a restart uses no "
    "snapshot, and one that would begin at step 0 is refused. With false it begins there."
)


def settings_table() -> str:
    """Every setting with all of its names, in Markdown, in the order of the class."""
    head = ("flag", "`run` flag", "environment", "JSON key", "default", "type", "meaning")
    return _table(
        [
            head,
            (f"`{SWITCH}`", "", "", f"`{ENABLED}`", "off", "true or false", SWITCH_HELP),
            *(_row(setting) for setting in SETTINGS.values()),
            ("", "", "", f"`{CLIENT_STATE}`", "none", "names and counters", CLIENT_STATE_HELP),
            ("", "", "", f"`{FOLLOWS_ENGINE}`", "unsaid", "true or false", FOLLOWS_ENGINE_HELP),
        ]
    )


def _row(setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit and setting.default is not None else ""
    return (
        f"`{setting.flag}`",
        f"`{setting.run_flag}`" if setting.job else "",
        f"`{setting.variable}`",
        f"`{setting.name}`",
        f"{setting.shown_default}{unit}",
        setting.allowed,
        setting.help,
    )


def commands() -> str:
    """Every subcommand: description, arguments and the exit codes of its own, in Markdown."""
    return "\n\n".join(part for command in COMMANDS for part in _command(command))


def _command(command: Command) -> Iterator[str]:
    module = import_module(command.module)
    yield f"## {command.name}"
    yield _prose(module.__doc__ or "")
    actions = _actions(command)
    shared = _actions(_RUN) if command.name == "doctor" else {}
    rows = [_argument(actions[name]) for name in actions if name not in {*SETTINGS, *shared}]
    if rows:
        yield _table([("argument", "meaning"), *rows])
    flags = [f"`{SETTINGS[name].run_flag}`" for name in actions if name in SETTINGS]
    if shared:
        yield "It takes all arguments of [run](#run) as well."
    elif flags:
        named = ", ".join(flags) if len(flags) < 9 else "every setting of the job that has a flag"
        yield f"From the [settings](settings.md): {named}."
    codes = sorted({**getattr(module, "EXIT_CODES", {})}.items())
    if codes:
        yield _table([("exit code", "meaning"), *((f"{code}", text) for code, text in codes)])


def _actions(command: Command) -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    import_module(command.module).add_arguments(parser)
    return {action.dest: action for action in parser._actions}


def _argument(action: argparse.Action) -> tuple[str, str]:
    name = f"{action.metavar or action.dest}"
    if action.option_strings:
        value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
        if action.choices and not action.metavar:
            value = f" {{{','.join(map(str, action.choices))}}}"
        name = ", ".join(action.option_strings) + value
    elif action.nargs == argparse.REMAINDER:
        return f"`{name}`", "the training command"
    text = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
    return f"`{name}`", _prose(text)


def _prose(text: str) -> str:
    """Text of a docstring or help as Markdown: its examples as code, its pages as links."""
    text = re.sub(r"(?:^  .*\n?)+", _code, text.strip().replace("``", "`"), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return re.sub(r"docs/(\S+)/(\S+)\.md", r"[\2](../\1/\2.md)", text)


def _code(lines: re.Match[str]) -> str:
    return f"\n```text\n{dedent(lines[0]).rstrip()}\n```\n"


def metrics_table() -> str:
    """Every metric of ``--metrics``, in Markdown."""
    suffix = {"Counter": "_total", "Info": "_info"}
    rows = [
        (
            f"`{PREFIX}{one.name}{suffix.get(one.kind, '')}`",
            one.kind.lower(),
            ", ".join(f"`{label}`" for label in one.labels),
            one.text,
        )
        for one in METRICS
    ]
    return _table([("metric", "type", "labels", "meaning"), *rows])


def schema() -> dict[str, Any]:
    """The JSON schema of the section."""
    properties: dict[str, Any] = {
        ENABLED: {"type": "boolean", "default": False, "description": SWITCH_HELP},
        CLIENT_STATE: {
            "type": "object",
            "additionalProperties": {"enum": [*COUNTERS, CONSTANT]},
            "description": CLIENT_STATE_HELP,
        },
        FOLLOWS_ENGINE: {"type": "boolean", "description": FOLLOWS_ENGINE_HELP},
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


def page_with(page: Path, new: str) -> str:
    """The page with its generated part replaced.  ValueError if a mark is not there once."""
    text = page.read_text()
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"{page} needs the line {mark!r} once, it has it {text.count(mark)}x")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def main() -> int:
    """Write or check; the exit code."""
    tested = compatibility_table.table(compatibility_table.read())
    files = {
        SETTINGS_PAGE: page_with(SETTINGS_PAGE, settings_table()),
        COMMANDS_PAGE: page_with(COMMANDS_PAGE, commands()),
        METRICS_PAGE: page_with(METRICS_PAGE, metrics_table()),
        COMPATIBILITY_PAGE: page_with(COMPATIBILITY_PAGE, _table(tested)),
        SCHEMA: json.dumps(schema(), indent=2) + "\n",
    }
    old = [path for path, text in files.items() if path.read_text() != text]
    for path in old:
        if sys.argv[1:] == ["--check"]:
            print(f"{path} is out of date; run scripts/flags_table.py")
        else:
            path.write_text(files[path])
    return int(bool(old) and sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    sys.exit(main())
