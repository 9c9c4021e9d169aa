"""Stop taking snapshots in a running job, or take them again.

What is committed stays; status shows its age.  The setting survives restarts of trainers.
"""

from __future__ import annotations

import argparse

from megatron_ft.cli import common
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job_name(parser)
    common.add_folders(parser)


def main(arguments: argparse.Namespace) -> int:
    """Tell every SMP of the job that can be reached from here."""
    pause = arguments.command == "pause"
    told, unreached = 0, []
    for path in sockets(common.root_of(arguments), arguments.job):
        try:
            ask(path, m.Pause(pause))
            told += 1
        except (ControlPlaneError, UntrustedFileError) as error:
            unreached.append(f"{path.parent.name} was not told: {error}")
    if not told:
        reasons = "".join(f"; {reason}" for reason in unreached)
        raise ControlPlaneError(f"no SMP of job {arguments.job!r} runs here{reasons}")
    print(f"snapshots {'paused' if pause else 'resumed'} on {told} nodes", *unreached, sep="\n")
    return 0
