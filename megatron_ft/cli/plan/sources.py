"""Rates of failures: from a job's events, from ``sacct``, from a trace, or as published."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from megatron_ft.cli.plan.simulate import Strike
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor.event_log import EVENTS, read_events
from megatron_ft.supervisor.job_state import state_folder
from megatron_ft.supervisor.ledger import NODE, ledger

LLAMA_GPU_HOURS = 54 * 24 * 16384 / 419
"""GPU hours between unexpected interruptions of Llama 3 405B: 419 in 54 days on 16,384 GPUs (The
Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4)."""

SACCT = "sacct -X --parsable2 --format=JobID,State,ElapsedRaw,NNodes"
_FAILED = ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
_LOST = ("NODE_FAIL", "BOOT_FAIL")


class History(NamedTuple):
    """Failures as far as known: seconds between two of them, the share that loses a node, seconds
    until training continued (0 if not known), and the failures one by one if it is a trace."""

    source: str
    mtbf: float
    node_share: float = 1.0
    restart: float = 0.0
    strikes: Sequence[Strike] = ()


def published(gpus: int) -> History:
    """Failures as often as published for a GPU; each is taken to lose its node."""
    text = "419 failures of 16,384 GPUs in 54 days (Llama 3, arXiv 2407.21783)"
    return History(text, LLAMA_GPU_HOURS / gpus * 3600)


def of_job(name: str, state_dir: Path | None) -> History:
    """The incidents in a job's ledger; ConfigError if it has none."""
    path = state_folder(name, state_dir) / EVENTS
    found = ledger(read_events(path).events)
    down = [one.down for one in found.incidents if one.down]
    count = len(found.incidents)
    if not count:
        raise ConfigError(
            f"--job {name}: {path} has no incident in {found.wall / 3600:.3g} h, so the time "
            "between failures is not known; give --mtbf-hours"
        )
    text = f"{count} incidents in {found.wall / 3600:.3g} h of job {name}"
    share = sum(one.kind == NODE for one in found.incidents) / count
    return History(text, found.wall / count, share, mean(down) if down else 0.0)


def of_trace(path: Path, nodes: int) -> History:
    """A trace file: a line ``hours,node`` for each failure, without a node if none is lost.

    Numbers below ``nodes`` are places; other names get the first places in order, and so are
    neighbours.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    read = [_failure(line, f"--trace {path}, line {n}") for n, line in enumerate(lines, 1) if line]
    names = sorted({name for _, name in read if name}, key=lambda name: (len(name), name))
    if len(names) > nodes:
        raise ConfigError(
            f"--trace {path} names {len(names)} nodes, --nodes is {nodes}; the nearest possible "
            f"is {len(names)}"
        )
    numbers = all(name.isdecimal() and int(name) < nodes for name in names)
    place = {name: int(name) if numbers else index for index, name in enumerate(names)}
    strikes = sorted(Strike(3600 * hours, place.get(name, -1)) for hours, name in read)
    if not strikes or not strikes[-1].at:
        raise ConfigError(f"--trace {path} has no failure after hour 0; write lines `hours,node`")
    last, count = strikes[-1].at, len(strikes)
    share = sum(strike.node >= 0 for strike in strikes) / count
    text = f"{count} failures in {last / 3600:.3g} h of {path}"
    return History(text, last / count, share, strikes=strikes)


def _failure(line: str, place: str) -> tuple[float, str]:
    hours, _, name = line.partition(",")
    try:
        value = float(hours)
    except ValueError as error:
        raise ConfigError(f"{place}: {line!r} is not a failure; write `hours,node`") from error
    if not 0 <= value < inf:
        raise ConfigError(f"{place}: {hours} hours; the nearest possible is 0")
    return value, name.strip()


def of_sacct(path: Path, nodes: int) -> History:
    """Output of ``SACCT`` in a file, "-" for the standard input: node hours a failure.

    Jobs that end FAILED, OUT_OF_MEMORY, NODE_FAIL or BOOT_FAIL count, the last two with a node.
    """
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    rows = [row for row in csv.DictReader(text.splitlines(), delimiter="|")]
    try:
        # The last state, without `by 1000`, and node seconds.
        jobs = [
            (str(row["State"]).split(" ")[0], float(row["ElapsedRaw"]) * int(row["NNodes"]))
            for row in rows
            if "." not in row["JobID"]
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"--sacct {path} is not the output of `{SACCT}`: {error!r}") from error
    failed = [state for state, _ in jobs if state in _FAILED]
    seconds = sum(spent for _, spent in jobs)
    if not failed or not seconds:
        raise ConfigError(
            f"--sacct {path}: none of {len(jobs)} jobs failed in {seconds / 3600:.3g} node hours, "
            "so the time between failures is not known; give --mtbf-hours"
        )
    lost = sum(state in _LOST for state in failed)
    text = f"{len(failed)} failed jobs in {seconds / 3600:.4g} node hours of sacct"
    return History(text, seconds / len(failed) / nodes, lost / len(failed))
