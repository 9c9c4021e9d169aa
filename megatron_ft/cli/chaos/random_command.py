"""``megatron-ft chaos --random``: the campaign of faults at random times, its lines and table."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.campaign import EpisodeResult, Limits, run_campaign, table
from megatron_ft.cli.chaos.campaign_plan import SCHEMES, JobPlan, jobs
from megatron_ft.cli.chaos.judge import OUTCOMES
from megatron_ft.cli.chaos.oracle import warm_python
from megatron_ft.cli.chaos.settings import Settings
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only ``--random`` reads."""
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="--random: begin faults so long (%(default)s)"
    )
    parser.add_argument(
        "--faults", type=int, default=sys.maxsize, help="--random: so many at most (no limit)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="--random: at once (%(default)s)")
    parser.add_argument("--job", type=int, help="--random: only the job of this number")


def main(arguments: argparse.Namespace) -> int:
    """Run the campaign; 1 if a promise was broken, or if nothing struck."""
    if arguments.training_command:
        raise ConfigError("--random trains its own small model: leave out the command")
    if arguments.minutes <= 0 or arguments.jobs < 1 or arguments.faults < 1:
        raise ConfigError("--minutes, --jobs and --faults are numbers above 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing either
    schemes = (str(Scheme.parse(arguments.protect)),) if arguments.protect else SCHEMES
    plans = jobs(arguments.seed, schemes)
    if arguments.job is not None:
        plans = itertools.islice(plans, arguments.job, arguments.job + 1)
    folder = Path(tempfile.mkdtemp(prefix="mft-chaos-"))
    warm = warm_python()
    limits = Limits(arguments.faults, time.monotonic() + 60 * arguments.minutes)
    results: list[EpisodeResult] = []

    def told(result: EpisodeResult) -> None:
        results.append(result)
        print(line(result, arguments), flush=True)
        _write(arguments, results)

    try:
        settings = Settings(
            folder,
            seed=arguments.seed,
            lease=arguments.lease_seconds,
            limit=arguments.limit_seconds,
            warm=warm.path,
        )
        run_campaign(plans, settings, limits, arguments.jobs, told)
    finally:
        warm.close()
    print("\n".join(["", summary(results), "", *table(results, OUTCOMES)]))
    good = all(result.ruling.good for result in results) and any(r.faults for r in results)
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


def line(result: EpisodeResult, arguments: argparse.Namespace) -> str:
    """One line of an episode; more of one that broke a promise."""
    ruling, job = result.ruling, result.job
    told = ruling.outcome if ruling.good else f"**{ruling.outcome.upper()}**"
    done = "; ".join(result.done) or result.episode.kind
    head = f"{job.number}.{result.number} [{job}] {done}: {told} ({result.seconds:.1f} s)"
    if ruling.good:
        return head
    again = ["megatron-ft", "chaos", "--random", "--seed", str(arguments.seed)]
    again += ["--job", str(job.number)]
    again += ["--protect", arguments.protect] if arguments.protect else []
    return "\n".join(
        [
            head,
            *(f"  {problem}" for problem in ruling.problems[:5]),
            result.tail,
            f"  logs: {result.folder}",
            f"  again, up to scheduling: {shlex.join(again)}",
        ]
    )


def summary(results: Sequence[EpisodeResult]) -> str:
    """The campaign in a sentence or two."""
    faults, bad = sum(r.faults for r in results), [r for r in results if not r.ruling.good]
    by_job: dict[JobPlan, int] = {}
    for result in results:
        by_job[result.job] = max(result.compared, by_job.get(result.job, 0))
    return (
        f"{faults} faults in {len(by_job)} jobs, {len(bad)} promises broken; "
        f"{sum(by_job.values())} iterations of ranks compared bit by bit."
    )


def _write(arguments: argparse.Namespace, results: Sequence[EpisodeResult]) -> None:
    """After every episode, so that a campaign that is interrupted leaves what it has."""
    if arguments.markdown:
        where = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
        head = (
            f"# Random faults: `megatron-ft chaos --random --seed {arguments.seed}`\n\n"
            f"{summary(results)} {date.today()}, {where}, Python {platform.python_version()}.\n"
        )
        arguments.markdown.write_text("\n".join([head, *table(results, OUTCOMES)]) + "\n")
    if arguments.json:
        found = [
            {
                "job": str(r.job),
                "number": f"{r.job.number}.{r.number}",
                "episode": r.episode,
                "done": r.done,
                "outcome": r.ruling.outcome,
                "problems": r.ruling.problems,
                "seconds": round(r.seconds, 1),
            }
            for r in results
        ]
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
