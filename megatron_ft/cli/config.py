"""Show every setting of a job: its value, and the place that gave it.

  megatron-ft config --protect xor:2 -- python pretrain_gpt.py ... --inmem-snapshot

Takes what `megatron-ft run` takes: write `config` for `run` in your launch line.  Nothing starts.
"""

from __future__ import annotations

import argparse
import json
import os

from megatron_ft.cli import run
from megatron_ft.cli.contents import rule
from megatron_ft.cli.training_command import command_of, settle, sources_of
from megatron_ft.config import SETTINGS
from megatron_ft.config.flags import read_command
from megatron_ft.config.json_section import read_command as read_section


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the settings as JSON")
    run.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Print the settings; ConfigError where places contradict each other."""
    command = command_of(arguments)
    settings = settle(vars(arguments), command, os.environ)
    rows, found = [], {}
    sources = sources_of(vars(arguments), command, os.environ)
    for name, declared in SETTINGS.items():
        origins = [source.label(name) for source in sources if name in source.given]
        value = getattr(settings, name)
        place = origins[0] if origins else "default"
        found[name] = {"value": value, "unit": declared.unit, "from": place}
        rows.append((name, "none" if value is None else f"{value} {declared.unit}".rstrip(), place))
    if arguments.json:
        print(json.dumps(found, indent=1, default=str))
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, text, place in rows:
        print(f"{name:{widths[0]}}  {text:{widths[1]}}  {place}")
    section = read_section(command)
    deepspeed = section is not None and section.enabled
    print(rule(megatron=read_command(command).enabled, deepspeed=deepspeed))
    return 0
