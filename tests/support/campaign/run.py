"""The random campaign: long jobs, each of which suffers one random fault after another."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.judge import Story
from megatron_ft.cli.chaos.runner import ChaosSettings, oracle_traces
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.cli.run import EXIT_NO_SPARE
from megatron_ft.config import SETTINGS
from tests.support.campaign.growth import Growth
from tests.support.campaign.inject import CampaignInjector
from tests.support.campaign.plan import START, Episode, JobPlan
from tests.support.campaign.rule import Ruling, rule
from tests.support.chaos_cluster import AWAY_FILE, AWAY_NAME
from tests.support.frozen_disk import can_freeze, freezable

MOST_SUPERVISORS = 200
SNAPSHOT_INTERVAL, DRAIN_INTERVAL = 4, 40
INTERVAL = SETTINGS["snapshot_interval"].variable
DISK_MIB = 64


@dataclass(frozen=True)
class EpisodeResult:
    """One episode and its outcome."""

    job: JobPlan
    number: int
    episode: Episode
    ruling: Ruling
    done: tuple[str, ...]
    seconds: float
    compared: int
    folder: Path
    tail: str

    @property
    def faults(self) -> int:
        """None at the start of a job, else one or two."""
        return self.episode.faults


@dataclass
class Limits:
    """When a campaign has done enough: after so many faults, or at a moment of the steady clock.

    Several jobs may ask at once.
    """

    faults: int
    deadline: float
    begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, episode: Episode) -> bool:
        """Whether an episode may begin; it counts then."""
        with self.lock:
            if self.begun >= self.faults or time.monotonic() > self.deadline:
                return False
            self.begun += episode.faults
            return True

    def over(self) -> bool:
        """Whether no other episode may begin."""
        return self.begun >= self.faults or time.monotonic() > self.deadline


OnResult = Callable[[EpisodeResult], None]


def run_campaign(
    plans: Iterator[JobPlan],
    settings: ChaosSettings,
    limits: Limits,
    at_once: int,
    on_result: OnResult,
    growth: Growth | None = None,
) -> list[EpisodeResult]:
    """Run jobs, ``at_once`` at a time, until the limits say that it is enough.

    ``growth`` collects samples of the processes of a job that is the only one.
    """
    oracles, lock = _Oracles(settings), threading.Lock()
    results: list[EpisodeResult] = []

    def record(result: EpisodeResult) -> None:
        with lock:
            results.append(result)
            on_result(result)

    def work() -> None:
        while not limits.over():
            with lock:
                plan = next(plans, None)
            if plan is None:
                return
            run_job(plan, settings, oracles.of(plan), limits, record, growth)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            for future in [pool.submit(work) for _ in range(at_once)]:
                future.result()
        finally:
            # Of an interrupted campaign each job ends with its episode, and leaves nothing.
            limits.deadline = 0.0
    return results


class _Oracles:
    """The uninterrupted run for each number of ranks, made when first needed."""

    def __init__(self, settings: ChaosSettings) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self._known: dict[tuple[int, int], Mapping[int, Lines]] = {}

    def of(self, plan: JobPlan) -> Mapping[int, Lines]:
        size = (plan.nodes * plan.ranks_per_node, plan.iterations)
        with self._lock:
            if size not in self._known:
                flags = {"--nodes": size[0], "--protect": "none"}
                alone = replace(self._settings, flags=flags, iterations=size[1])
                self._known[size] = oracle_traces(alone)
            return self._known[size]


def run_job(
    plan: JobPlan,
    settings: ChaosSettings,
    oracle: Mapping[int, Lines],
    limits: Limits,
    on_result: OnResult,
    growth: Growth | None = None,
) -> None:
    """One job with all its episodes, until one of them breaks a promise or ends the job."""
    name = f"chaos-{plan.number}-{time.monotonic_ns() % 10**6}"
    folder = settings.folder / name
    folder.mkdir(mode=0o700, parents=True)
    good = True

    def record(result: EpisodeResult) -> None:
        nonlocal good
        good &= result.ruling.good
        on_result(result)

    asyncio.run(_Job(plan, settings, folder, oracle, growth).run(limits, record))
    if good:
        shutil.rmtree(folder, ignore_errors=True)


class _Job:
    """The state of a job that runs."""

    def __init__(
        self,
        plan: JobPlan,
        settings: ChaosSettings,
        folder: Path,
        oracle: Mapping[int, Lines],
        growth: Growth | None,
    ) -> None:
        self.plan, self.oracle, self.limit, self.folder = plan, oracle, settings.limit, folder
        self._growth = growth
        self._disk = folder / "disk"
        flags = {
            "--nodes": plan.nodes,
            "--spares": plan.spares,
            "--ranks-per-node": plan.ranks_per_node,
            "--protect": plan.protect,
            "--slots": plan.slots,
            "--transport": plan.transport,
            "--warm-start": "on" if plan.restarts else "off",
        }
        if plan.drains:
            flags |= {"--drain-dir": self._disk, "--drain-interval": DRAIN_INTERVAL}
        job = replace(settings, iterations=plan.iterations).job(folder.name, folder, flags)
        interval = str(1 if plan.gap else SNAPSHOT_INTERVAL)
        own = {INTERVAL: interval, AWAY_FILE: str(folder / AWAY_NAME)}
        training = (*job.training, *["--resilient"] * plan.restarts)
        self.job = replace(job, training=training, variables={**job.variables, **own})
        self.follower = Follower(self.job, MOST_SUPERVISORS)
        self._end = ""

    async def run(self, limits: Limits, on_result: OnResult) -> None:
        with ExitStack() as opened:
            disk = None
            if self.plan.hangs and can_freeze():
                place = self._disk
                disk = opened.enter_context(freezable(place.parent, DISK_MIB, place.name))
            self.striker = CampaignInjector(self.follower, self.folder, self.limit, disk)
            await self._run(limits, on_result)

    async def _run(self, limits: Limits, on_result: OnResult) -> None:
        self.follower.start()
        try:
            for number, episode in enumerate((START, *self.plan.episodes)):
                if number and (self._over() or not limits.take(episode)):
                    break
                result = await self._episode(number, episode)
                on_result(result)
                if not result.ruling.good or self._end:
                    break
        finally:
            self.striker.tidy()

    async def _episode(self, number: int, episode: Episode) -> EpisodeResult:
        """Strike, await a settled job, and judge."""
        follower, striker = self.follower, self.striker
        await asyncio.sleep(episode.first.wait)
        since, before = time.monotonic(), len(striker.strikes)
        end, reason = "settled", ""
        try:
            if episode.faults:
                await striker.strike(episode.first)
            if episode.second is not None:
                await asyncio.sleep(episode.second.wait)
                await striker.strike(episode.second)
            await until(lambda: self._settled() or self._over(), self.limit, self.striker.missing)
            for _ in range(3):
                if self._to_be_continued():
                    await self._again()
            end = self._end or end
        except TimeoutError as error:
            end, reason = "hang", str(error)
        follower.read()
        traces = read_traces(self.folder / "trace", self.plan.nodes * self.plan.ranks_per_node)
        story = Story(
            parity=self.job.spec.scheme.parity_members,
            events=follower.events,
            strikes=striker.strikes,
            traces=traces,
            oracle=self.oracle,
            reached=True,
            end=end,
            reason=reason,
            disk=self.plan.drains,
            starts=read_starts(self.folder / "trace"),
        )
        return EpisodeResult(
            self.plan,
            number,
            episode,
            rule(story, since, self.plan.spares),
            tuple(strike.text for strike in striker.strikes[before:]),
            time.monotonic() - since,
            sum(len(lines) for lines in traces.values()),
            self.folder,
            follower.tail(20),
        )

    def _to_be_continued(self) -> bool:
        """True if the job stopped for lack of a node, or training stopped itself as planned."""
        if self._end == "stopped":
            return self.follower.code == EXIT_NO_SPARE
        return self._end == "finished" and self.striker.stop.exists()

    async def _again(self) -> None:
        """Nodes are back, training is not told to stop any more, and the user runs it again."""
        await until(lambda: not self.striker.curing(), self.limit, self.striker.missing)
        self._end = ""
        self.striker.stop.unlink(missing_ok=True)
        self.striker.restarts = time.monotonic()
        self.follower.start()
        await until(lambda: self._settled() or self._over(), self.limit, self.striker.missing)

    def _over(self) -> bool:
        self.follower.read()
        self._end = self._end or self.follower.over()
        if self._growth is not None:
            self._growth.look(self.follower, max(self.striker.quiet, self.striker.restarts))
        return bool(self._end)

    def _settled(self) -> bool:
        """Whether the job trains and has protected snapshots since the last thing done to it."""
        striker, follower = self.striker, self.follower
        if striker.curing() or follower.count("training", striker.restarts) == 0:
            return False
        if striker.stop.exists() or (
            striker.drains and not follower.count("drained", striker.drains)
        ):
            return False
        commits = follower.protected_commits(max(striker.quiet, striker.restarts))
        return commits >= max(2, self.plan.gap)


def read_starts(folder: Path) -> list[tuple[float, int]]:
    """Moment and iteration of every start of every rank."""
    lines = [line for path in folder.glob("start*.jsonl") for line in path.read_text().splitlines()]
    return [(start["at"], start["iteration"]) for start in map(json.loads, lines)]


def table(results: Sequence[EpisodeResult], outcomes: Sequence[str]) -> list[str]:
    """Kinds of faults by outcomes, as lines of Markdown."""
    kinds = sorted({result.episode.kind for result in results})
    rows = [
        "| fault | episodes | " + " | ".join(outcomes) + " |",
        "| --- |" + " ---: |" * (len(outcomes) + 1),
    ]
    for kind in [*kinds, ""]:
        of = [r for r in results if kind in ("", r.episode.kind)]
        counts = [sum(r.ruling.outcome == outcome for r in of) for outcome in outcomes]
        cells = [str(count) if count else "" for count in counts]
        name = f"`{kind}`" if kind else "**all**"
        rows.append(f"| {name} | {len(of)} | " + " | ".join(cells) + " |")
    return rows
