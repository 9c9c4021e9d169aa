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
    """Send it to every SMP of the job that can be reached from here."""
    pause = arguments.command == "pause"
    reached, unreached = 0, []
    for path in sockets(common.root_of(arguments), arguments.job):
        try:
            ask(path, m.Pause(pause))
            reached += 1
        except (ControlPlaneError, UntrustedFileError) as error:
            unreached.append(f"{path.parent.name} was not reached: {error}")
    if not reached:
        reasons = "".join(f"; {reason}" for reason in unreached)
        raise ControlPlaneError(f"no SMP of job {arguments.job!r} runs here{reasons}")
    print(f"snapshots {'paused' if pause else 'resumed'} on {reached} nodes", *unreached, sep="\n")
    return 0
