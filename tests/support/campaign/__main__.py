"""Run long jobs of all schemes and transports, with faults of all kinds at random times.

    python -m tests.support.campaign --seed 7 --minutes 30
    python -m tests.support.campaign --soak 1000 --faults 25 --protect rs:3+1 --stripes 2
    python -m tests.support.campaign --restarts 200 --protect rs:3+1

A soak is one job that takes snapshots as often as it can and whose processes must not grow.
Exit codes: 0 every promise was kept, 1 one was broken, a process grew, or nothing struck.
"""

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
from typing import Any

import msgspec

from megatron_ft.cli.chaos.runner import ChaosSettings
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from tests.support.campaign.growth import RESTARTED_ROLES, ROLES, Growth, growth_table, judge
from tests.support.campaign.plan import SCHEMES, WEIGHTS, JobPlan, jobs, soak
from tests.support.campaign.rule import OUTCOMES
from tests.support.campaign.run import EpisodeResult, Limits, run_campaign, table
from tests.support.chaos_cluster import equipment, forked_trainers
from tests.support.warm_host import WarmHost


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="draws jobs, faults and moments")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="begin faults so long (%(default)s)"
    )
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="so many at most")
    parser.add_argument("--jobs", type=int, default=1, help="at once (%(default)s)")
    parser.add_argument("--job", type=int, help="only the job of this number")
    parser.add_argument("--protect", help="protection of all jobs (default: every scheme in turn)")
    parser.add_argument("--kinds", help="only faults that begin so, with commas between")
    parser.add_argument("--lease-seconds", type=float, default=4.0, help="(%(default)s)")
    parser.add_argument(
        "--limit-seconds", type=float, default=60.0, help="longest wait (%(default)s)"
    )
    parser.add_argument("--soak", type=int, default=0, help="one job, this many snapshots")
    parser.add_argument("--restarts", type=int, default=0, help="one job, this many in a row")
    parser.add_argument("--stripes", type=int, default=1, help="of the job (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="of the job (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--json", type=Path, help="write every episode to this file")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign."""
    arguments = _parser().parse_args(words)
    if arguments.minutes <= 0 or arguments.jobs < 1 or arguments.faults < 1:
        raise ConfigError("--minutes, --jobs and --faults are numbers above 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing either
    schemes = (str(Scheme.parse(arguments.protect)),) if arguments.protect else SCHEMES
    begins = tuple((arguments.kinds or "").split(","))
    if not any(kind.startswith(begins) for kind in WEIGHTS):
        raise ConfigError(f"--kinds: no fault begins so; there are {', '.join(WEIGHTS)}")
    plans = jobs(arguments.seed, schemes, begins)
    if arguments.job is not None:
        plans = itertools.islice(plans, arguments.job, arguments.job + 1)
    folder = Path(tempfile.mkdtemp(prefix="mft-chaos-"))
    warm = WarmHost()
    limits = Limits(arguments.faults, time.monotonic() + 60 * arguments.minutes)
    growth = Growth() if arguments.soak or arguments.restarts else None
    if growth is not None:
        plans = iter([_soak(arguments)])
    results: list[EpisodeResult] = []

    def on_result(result: EpisodeResult) -> None:
        results.append(result)
        print(line(result, arguments), flush=True)
        _write(arguments, results)

    try:
        settings = ChaosSettings(
            folder,
            {"--lease-seconds": arguments.lease_seconds},
            seed=arguments.seed,
            limit=arguments.limit_seconds * (1 if growth is None else 4),
            **_equipment(arguments, warm),
        )
        run_campaign(plans, settings, limits, arguments.jobs, on_result, growth)
    finally:
        warm.close()
    print("\n".join(["", summary(results), "", *table(results, OUTCOMES)]))
    good = all(result.ruling.good for result in results) and any(r.faults for r in results)
    if growth is not None:
        lines = judge(growth.samples, roles=RESTARTED_ROLES if arguments.restarts else ROLES)
        print("\n".join(["", *growth_table(lines)]))
        good &= all(line.flat for line in lines)
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


def _equipment(arguments: argparse.Namespace, host: WarmHost) -> dict[str, Any]:
    """Processes that are measured start as a user's do."""
    if arguments.restarts:
        return {}
    return forked_trainers(host) if arguments.soak else equipment(host)


def _soak(arguments: argparse.Namespace) -> JobPlan:
    shape = JobPlan(
        number=0,
        protect=arguments.protect or SCHEMES[0],
        transport="auto",
        spares=max(1, arguments.stripes),
        slots=2,
        drains=False,
        episodes=(),
        stripes=arguments.stripes,
        ranks_per_node=arguments.ranks_per_node,
    )
    faults = min(arguments.faults, arguments.soak // 40)
    sizes = {"snapshots": arguments.soak, "faults": faults, "restarts": arguments.restarts}
    return soak(arguments.seed, shape, **sizes)


def line(result: EpisodeResult, arguments: argparse.Namespace) -> str:
    """One line of an episode; more of one that broke a promise."""
    ruling, job = result.ruling, result.job
    end = ruling.outcome if ruling.good else f"**{ruling.outcome.upper()}**"
    done = "; ".join(result.done) or result.episode.kind
    head = f"{job.number}.{result.number} [{job}] {done}: {end} ({result.seconds:.1f} s)"
    if ruling.good:
        return head
    again = ["python", "-m", "tests.support.campaign", "--seed", str(arguments.seed)]
    again += ["--job", str(job.number)]
    again += ["--protect", arguments.protect] if arguments.protect else []
    again += ["--kinds", arguments.kinds] if arguments.kinds else []
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
            f"# Random faults: `python -m tests.support.campaign --seed {arguments.seed}`\n\n"
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


if __name__ == "__main__":
    sys.exit(main())
