"""A soak from its first snapshot to the comparison with the uninterrupted run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.job import TRAINING_MODULE, ChaosSettings, JobFile
from megatron_ft.cli.chaos.runner import oracle_traces
from megatron_ft.cli.chaos.trace import differences, gaps, read_traces
from tests.support.chaos_cluster import CLUSTER_CLASS
from tests.support.soak.inject import RESTART_CLUSTER, SOAK_CLUSTER, SoakInjector, in_use, roles
from tests.support.soak.measure import Sample, sample_all
from tests.support.soak.plan import SoakFault, plan, restarts

ENDS = ("committed", "aborted", "dropped")
"""Events that end a snapshot: every one that was permitted comes to one of these."""

LEASE_SECONDS = 20.0
ENOUGH_ITERATIONS = 10_000_000


@dataclass(frozen=True)
class Soak:
    """Settings of a soak: so many ``snapshots`` with parity; those that are taken while no
    encoder world is up come on top.

    ``limit`` is how long the job may take for any one thing, ``minutes`` how long all of it
    lasts before it is told to end; ``every`` is snapshots between samples, and ``calm`` how many
    samples there must be after the last fault.  With ``restarts`` faults are those of restarts in a
    row, and trainers start as a user's do.
    """

    folder: Path
    snapshots: int = 1000
    nodes: int = 8
    ranks_per_node: int = 2
    spares: int = 2
    restarts: bool = False
    protect: str = "rs:3+1"
    faults: int = 25
    seed: int = 0
    minutes: float = 60.0
    every: int = 5
    limit: float = 240.0
    calm: int = 8
    iteration_seconds: float = 0.05
    warm: str = ""
    tell: Callable[[str], None] = print

    def plan(self) -> tuple[SoakFault, ...]:
        """The faults."""
        if self.restarts:
            return restarts(self.seed, self.faults, self.nodes, self.ranks_per_node)
        return plan(self.seed, self.snapshots, self.faults, self.nodes, self.ranks_per_node)

    def job(self) -> JobFile:
        """The job, which captures every iteration that it can."""
        words = ["--iterations", ENOUGH_ITERATIONS, "--seconds", self.iteration_seconds]
        words += ["--stop", self.folder / "stop", *["--resilient"] * self.restarts]
        return JobFile(
            name=f"soak-{os.getpid()}-{time.monotonic_ns() % 10**6}",
            folder=str(self.folder),
            command=(sys.executable, "-m", TRAINING_MODULE, *map(str, words)),
            nodes=self.nodes,
            spares=self.spares,
            protect=self.protect,
            ranks_per_node=self.ranks_per_node,
            snapshot_interval=1,
            lease=LEASE_SECONDS,
            warm_start=self.restarts,
            cluster_class=RESTART_CLUSTER if self.restarts else SOAK_CLUSTER,
            warm=self.warm,
            trace=str(self.folder / "trace"),
        )


@dataclass
class Result:
    """The end of a soak.  ``problem`` says why it did not end well, "" if it did."""

    soak: Soak
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    iterations: int = 0
    seconds: float = 0.0
    differences: tuple[str, ...] = ()
    problem: str = ""

    @property
    def taken(self) -> int:
        """Snapshots that were permitted and have ended, one way or another."""
        return sum(self.counts[kind] for kind in ENDS)

    @property
    def protected(self) -> int:
        """Snapshots that were committed with parity: those that the soak is made of."""
        return self.counts["committed protected"]


def run(soak: Soak) -> Result:
    """Run it; nothing is left but the folder."""
    result = Result(soak)
    started = time.monotonic()
    asyncio.run(_Running(soak, result).run())
    result.seconds = time.monotonic() - started
    if not result.problem:
        _compare(soak, result)
    return result


class _Running:
    """A soak that runs."""

    def __init__(self, soak: Soak, result: Result) -> None:
        self._soak, self._result = soak, result
        self._deadline = time.monotonic() + 60.0 * soak.minutes
        self._follower = Follower(soak.job(), most_restarts=0)
        self._counted = self._sampled = 0
        self._newest_protected = False
        self._calm = 0
        self._struck = 0.0
        self._late = False

    async def run(self) -> None:
        try:
            self._follower.start()
            await self._train()
        except TimeoutError as error:
            self._result.problem = f"{error}; it told last:\n{self._follower.tail()}"
        finally:
            self._follower.end()

    async def _train(self) -> None:
        await self._until(lambda: self._committed_since(0.0) >= 1, "the first protected snapshot")
        injector = SoakInjector(self._follower, self._soak.seed)
        for fault in self._soak.plan():
            await self._until(lambda at=fault.at: self._reached(at), f"snapshot {fault.at}")  # type: ignore[misc]
            if self._ended():
                break
            # Survivors are torn down from now on, and their memory and threads are not there.
            self._struck = time.monotonic()
            text = await injector.inject(fault)
            self._result.faults[fault.kind] += 1
            self._calm = 0
            self._soak.tell(f"after {self._result.protected} snapshots: {text}")
            await self._settled(time.monotonic(), text)
        last = self._soak.snapshots
        await self._until(
            lambda: self._reached(last) and self._calm >= self._soak.calm, f"snapshot {last}"
        )
        (self._soak.folder / "stop").touch()
        await until(self._is_over, self._soak.limit, lambda: "the job to end")
        if self._follower.over() != "finished" and not self._result.problem:
            self._result.problem = f"the job stopped: {self._follower.last_error()[1]}"

    async def _settled(self, since: float, text: str) -> None:
        """Nothing more is done to a job before it could lose a node again."""
        await self._until(lambda: self._committed_since(since) >= 2, f"protection after: {text}")

    async def _until(self, condition: Callable[[], bool], whom: str) -> None:
        """Wait, and sample meanwhile, for as long as the job makes progress."""
        while not (condition() or self._ended()):
            before = self._result.taken
            await until(
                lambda at=before: condition() or self._ended() or self._result.taken > at,  # type: ignore[misc]
                self._soak.limit,
                lambda: whom,
            )

    def _reached(self, snapshots: int) -> bool:
        return self._result.protected >= snapshots

    def _ended(self) -> bool:
        """Whether it is over, or its time is; events are taken in on the way."""
        self._is_over()
        if time.monotonic() > self._deadline and not self._late:
            self._late = True
            self._soak.tell(f"the time is over after {self._result.protected} snapshots")
        return bool(self._result.problem) or self._late

    def _is_over(self) -> bool:
        self._count()
        over = self._follower.over()
        if over == "stopped":
            self._result.problem = f"the job stopped: {self._follower.last_error()[1]}"
        return bool(over)

    def _count(self) -> None:
        self._follower.read()
        for event in self._follower.events[self._counted :]:
            kind = event["kind"]
            self._result.counts[kind] += 1
            if kind == "committed":
                self._result.counts[f"committed {event['level']}"] += 1
                self._newest_protected = event["level"] == "protected"
            if kind == "recovered":
                self._result.restarts.update({k: len(r) for k, r in event["starts"].items()})
            if kind == "restoring":
                self._result.counts[f"restored from {event.get('source', '?')}"] += 1
        self._counted = len(self._follower.events)
        # Without an encoder world, snapshots are many and processes are just being started.
        settled = self._newest_protected and self._committed_since(self._struck) >= 2
        if self._result.protected >= self._sampled + self._soak.every and settled:
            self._sampled = self._result.protected
            self._sample()

    def _sample(self) -> None:
        supervisor = ("supervisor", self._follower.process.pid)
        running = [*in_use(roles(self._follower.job.name)), supervisor]
        found = sample_all(running, self._result.protected)
        self._calm += 1
        self._result.samples += found
        if self._sampled // 50 > (self._sampled - self._soak.every) // 50:
            self._soak.tell(_summary(self._result.protected, found))

    def _committed_since(self, moment: float) -> int:
        return self._follower.protected_commits(moment)


def _summary(protected: int, samples: list[Sample]) -> str:
    """The averages of the processes of each role."""
    parts = []
    for role in ("supervisor", "smp", "encoder", "trainer"):
        ours = [one for one in samples if one.role == role]
        if ours:
            mean = sum(one.proportional for one in ours) / len(ours) / (1 << 20)
            most = max(one.descriptors for one in ours), max(one.threads for one in ours)
            parts.append(f"{len(ours)} {role} {mean:.1f} MiB {most[0]} fds {most[1]} threads")
    return f"{protected} snapshots: {'; '.join(parts)}"


def _compare(soak: Soak, result: Result) -> None:
    """Train the same without interruption, and compare every iteration of every incarnation."""
    ranks = soak.nodes * soak.ranks_per_node
    ours = read_traces(soak.folder / "trace", ranks)
    result.iterations = max(line["iteration"] for lines in ours.values() for line in lines)
    soak.tell(f"training {result.iterations} iterations without interruption")
    settings = ChaosSettings(
        soak.folder,
        nodes=soak.nodes,
        protect=soak.protect,
        ranks_per_node=soak.ranks_per_node,
        iterations=result.iterations,
        cluster_class=CLUSTER_CLASS,
        warm=soak.warm,
    )
    found = [*gaps(ours), *differences(ours, oracle_traces(settings))]
    if len(ours) != ranks:
        found.append(f"only {len(ours)} of {ranks} ranks wrote a trace")
    result.differences = tuple(found)
