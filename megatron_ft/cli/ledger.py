"""Show where the time of a job went: every second of it in exactly one category.

Reads the events in the job's state folder; the job may still run, or have ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence

from megatron_ft.cli.common import add_job, say
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.event_log import EVENTS, LoggedEvent, read_events
from megatron_ft.supervisor.job_state import state_folder
from megatron_ft.supervisor.ledger import CATEGORIES, Incident, Ledger, ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def events_of(arguments: argparse.Namespace) -> Sequence[LoggedEvent]:
    """The events of the newest job of ``add_job``'s flags; ConfigError if there are none."""
    path = state_folder(arguments.job, arguments.state_dir) / EVENTS
    events, foreign = read_events(path)
    if not events:
        raise ConfigError(
            f"{path} has no events: name the job (--job), and the folder of its notes if it has "
            "one (--state-dir)"
        )
    if foreign:
        say(f"megatron-ft: {foreign} lines of {path} are not events and are left out")
    return events


def main(arguments: argparse.Namespace) -> int:
    events = events_of(arguments)
    found = ledger(events)
    if arguments.json:
        print(json.dumps({"job": arguments.job, **found.to_dict()}, indent=1))
    else:
        print("\n".join(lines(arguments.job, found)))
        began = events[0].time
        for one in found.incidents:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began + one.at))
            print(f"  {moment}  {_describe(one)}")
    return 0


def lines(job: str, found: Ledger) -> Iterator[str]:
    count = len({span.incarnation for span in found.spans if span.incarnation})
    yield (
        f"{job}: {found.wall:.1f} s, incarnations: {count}, incidents: {len(found.incidents)}, "
        f"productive: {found.ettr:.1%} (ETTR)"
    )
    for name, seconds in found.seconds().items():
        if seconds:
            share = seconds / found.wall if found.wall else 0.0
            yield f"  {name:<10} {seconds:10.2f} s {share:7.1%}  {CATEGORIES[name]}"


def _describe(one: Incident) -> str:
    text = f"{one.kind}: {one.text}"
    if one.source:
        text += f"; iteration {one.iteration} from {one.source}, {one.lost} iterations lost"
    if one.down:
        return f"{text}; down {one.down:.2f} s, then {one.redone:.2f} s to catch up"
    return f"{text}; training has not continued"
