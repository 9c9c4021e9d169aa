"""The folder of all jobs' arenas, as a command that looks at jobs is told of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_ft.config import SETTINGS
from megatron_ft.launchers.virtual import default_root

_SETTING = SETTINGS["arena_dir"]


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--arena-dir``."""
    parser.add_argument(
        "--arena-dir",
        type=Path,
        help=f"the --arena-dir of the job, if it has one (default: {_SETTING.variable}, as for "
        f"`megatron-ft run`, else {default_root()})",
    )


def root_of(arguments: argparse.Namespace) -> Path:
    """What the flag says, else the environment; ConfigError if that names no folder."""
    named: Path | None = arguments.arena_dir or _SETTING.parse(
        os.environ.get(_SETTING.variable), _SETTING.variable
    )
    return named or default_root()
