"""Write one HTML file that shows a job: its time, faults, recoveries, progress and events.

Reads the events in the job's state folder; the job may still run, or have ended.  The file needs
nothing else: no script, no network.  One that is there is replaced.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.cli.common import add_job, replace_output, say
from megatron_ft.cli.ledger import events_of
from megatron_ft.cli.report.page import page
from megatron_ft.supervisor.event_log import LoggedEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where to write it (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    write_report(arguments.output, arguments.job, events_of(arguments))
    say(f"megatron-ft: the report is {arguments.output}")
    return 0


def write_report(path: Path, job: str, events: Sequence[LoggedEvent]) -> None:
    replace_output(path, page(job, events, time.time()))
