"""The start that Megatron's ranks will agree on, known to the supervisor before they run.

The same rule is applied to the same arguments and files. Where they cannot be known here (the
command is a script that hides them, or names a checkpoint), the ranks decide by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.checkpoint.native import disk_of, iteration_of, newest_checkpoint
from megatron_ft.config import SWITCH
from megatron_ft.core.process_tools import in_thread
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.trainer.start_choice import RankView, StartDecision, decide

LOOK_SECONDS = 10.0


def foresee(command: Sequence[str], offered: int, rewound: bool) -> StartDecision | None:
    """The decision for a snapshot of iteration ``offered``; None if it is not known here."""
    args = _arguments(command)
    if SWITCH not in command or not args.load:
        return None
    disk = disk_of(args)
    return None if disk.asked else decide([RankView(offered, disk, rewound=rewound)])


def folder_of(spec: JobSpec) -> Path | None:
    """Where the framework saves its own checkpoints, as far as it is known."""
    load = _arguments(spec.command).load
    return spec.checkpoint_dir or (None if load is None else Path(load))


async def newest_saved(folder: Path | None) -> int:
    """The newest iteration that the framework has saved itself; -1 for none, or if unknown."""

    def look() -> int:
        newest = newest_checkpoint(folder)
        return -1 if newest is None else iteration_of(newest)

    try:
        return await in_thread(look, LOOK_SECONDS)
    except (asyncio.TimeoutError, OSError):
        return -1


def _arguments(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--load")
    parser.add_argument("--pretrained-checkpoint")
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--ckpt-step", type=int)
    parser.add_argument("--override-ckpt-iteration", type=int)
    try:
        return parser.parse_known_args(list(command))[0]
    except argparse.ArgumentError:
        return argparse.Namespace(load=None)
