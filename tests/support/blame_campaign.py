"""Injects faults of ten kinds into real jobs, and compares who was named with who was hit.

    python -m tests.support.blame_campaign --seed 7 --faults 100 --json found.json
    python -m tests.support.blame_campaign --clean-minutes 30

Exit codes: 0 at least 95 % were right and nobody was named without a fault, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from megatron_ft.arena.limits import CGROUP_ROOT, oom_counter
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.supervisor import autopsy as a
from megatron_ft.supervisor.budget import RestartBudget
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.orders import Timing
from tests.programs import blamed_training as program
from tests.support.jobs import Job, trainers_of
from tests.support.warm_host import WarmHost

STRAGGLER = "straggler"
KINDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "SIGKILL": {"killed": (a.SIGNAL, "")},
    "SIGSTOP": {"suspended": (a.HANG, a.SUSPENDED)},
    "OOM by cgroup": {"memory": (a.MEMORY, "")},
    "exception": dict.fromkeys(
        ("exception", "exception-late", "exception-loader"), (a.EXCEPTION, "")
    ),
    "mismatched collective": {
        "other-collective": (a.HANG, a.OTHER_CALL),
        **dict.fromkeys(program.SIZES, (a.MISMATCH, "")),
    },
    "GIL held": dict.fromkeys(("locked", "locked-asleep", "locked-thread"), (a.HANG, a.LOCKED)),
    "stalled data loader": dict.fromkeys(("loader", "loader-worker"), (a.HANG, a.LOADER)),
    "1.3x slow rank": {"slow": (STRAGGLER, "")},
    "node loss": {"lost": (a.NODE, "")},
    "network cut": {"cut": (a.CUT, "")},
}
"""The variants of each kind, with the class and the way that are right for them."""

NODES, FAULTS_PER_JOB = 3, 25
OF_NODES = ("lost", "cut")
WAIT_SECONDS = 120.0
RIGHT, UNKNOWN, WRONG = "right", "unknown", "wrong"
HANG_SECONDS = 3.0
TIMING = Timing(heartbeat=0.5, lease=3.0, node_timeout=4.5)
VERDICTS = ("autopsy", STRAGGLER)
ALARMS = {*VERDICTS, "hang", "watch_failed", "silent", "incarnation_ended"}


@dataclass(frozen=True)
class Drawn:
    """One fault: of which kind, on which rank, how many iterations and seconds into one later."""

    number: int
    kind: str
    variant: str
    rank: int
    gap: int
    delay: float


def plan(seed: int, faults: int) -> list[Drawn]:
    """The faults that a seed stands for; each ten of them are of all kinds.

    No rank is hit twice in a row: the job would give its node up.
    """
    chance, drawn, last = random.Random(f"blame {seed}"), list[Drawn](), -1
    while len(drawn) < faults:
        for kind in chance.sample(sorted(KINDS), len(KINDS)):
            rank = chance.choice([rank for rank in range(NODES) if rank != last])
            variants = list(KINDS[kind])
            variant = variants[(seed + len(drawn) // len(KINDS)) % len(variants)]
            last = last if variant == "slow" else rank
            gap, delay = chance.randrange(8), chance.uniform(0.0, 0.06)
            drawn.append(Drawn(len(drawn), kind, variant, rank, gap, round(delay, 4)))
    return drawn[:faults]


@dataclass(frozen=True)
class Named:
    """A verdict: rank (-1: none), node, class and way."""

    rank: int
    node: str
    kind: str
    how: str = ""

    @classmethod
    def by(cls, event: JobEvent) -> Named:
        known = event.fields
        return cls(
            known["rank"], known["node"], known.get("verdict", event.kind), known.get("how", "")
        )


def outcome(expected: Named, found: Named | None) -> str:
    """Pure: right in all; unknown where nothing is said that is not so; else wrong."""
    if found == expected:
        return RIGHT
    if found is None or found.kind == a.UNKNOWN:
        return UNKNOWN
    no_other = found.rank in (-1, expected.rank) and found.node in ("", expected.node)
    return UNKNOWN if no_other and found.kind == expected.kind and not found.how else WRONG


@dataclass(frozen=True)
class Result:
    fault: Drawn
    outcome: str
    expected: Named
    found: Named | None
    seconds: float
    text: str


class Injector:
    """Makes a job suffer one fault after the other; called in a thread beside the job."""

    def __init__(
        self, faults: Sequence[Drawn], orders: Path, on_result: Callable[[Result], None]
    ) -> None:
        self._faults, self._orders, self._on_result = faults, orders, on_result
        self.caused: set[int] = set()
        """Places, among the events of the job, of verdicts on what was injected."""

    def __call__(self, job: Job) -> None:
        for fault in self._faults:
            self._until(lambda: settled(job), f"the job to settle before {fault}", job)
            self._on_result(self._inject(fault, job))
        self._until(lambda: settled(job), "the job to settle at the end", job)
        job.interrupt()

    def _inject(self, fault: Drawn, job: Job) -> Result:
        kind, how = KINDS[fault.kind][fault.variant]
        node = job.supervisor.trainers.nodes_by_rank()[fault.rank]
        expected = Named(-1 if fault.variant in OF_NODES else fault.rank, node, kind, how)
        since = len(job.events)
        struck = self._strike(fault, node, job)
        wanted = STRAGGLER if kind == STRAGGLER else "autopsy"

        def verdicts() -> list[int]:
            return [i for i in range(since, len(job.events)) if job.events[i].kind == wanted]

        with suppress(TimeoutError):
            self._until(lambda: bool(verdicts()), f"a verdict on {fault}", job)
        self._cure(fault, node, job)
        place = next(iter(verdicts()), None)
        if place is None:
            return Result(fault, UNKNOWN, expected, None, WAIT_SECONDS, job.story()[-3000:])
        self.caused.add(place)
        event = job.events[place]
        found = Named.by(event)
        seconds = round(event.monotonic - struck, 2)
        return Result(fault, outcome(expected, found), expected, found, seconds, event.text)

    def _strike(self, fault: Drawn, node: str, job: Job) -> float:
        """Have the fault strike; the moment."""
        if fault.variant in OF_NODES:
            time.sleep(fault.gap * fault.delay)
            now = time.monotonic()
            assert job.network is not None
            if fault.variant == "cut":
                job.network.cut([node])
            else:
                job.cluster.kill_node(node)
            return now
        progress = max(one.report.iteration for one in job.supervisor.fleet.heartbeats.all())
        at = progress + 10 + fault.gap
        program.Order(fault.number, fault.variant, fault.rank, at, fault.delay).write(self._orders)
        struck = self._orders / f"struck-{fault.number}"
        self._until(lambda: struck.exists() and struck.read_text() != "", f"{fault} to strike", job)
        return float(struck.read_text())

    def _cure(self, fault: Drawn, node: str, job: Job) -> None:
        """End the fault.  A node comes back, as a spare, once another one has its place."""
        if fault.variant in OF_NODES:
            self._until(lambda: settled(job), f"the job to settle after {fault}", job)
        if fault.variant == "cut" and job.network is not None:
            job.network.heal()
        elif fault.variant == "lost":
            job.cluster.revive(node)
        program.Order(fault.number, "none", -1, 0, 0.0).write(self._orders)

    def _until(self, condition: Callable[[], bool], what: str, job: Job) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited for {what}:\n{job.story()[-5000:]}")
            time.sleep(0.1)


def settled(job: Job) -> bool:
    """True once all ranks train, some iterations ago, and have a protected snapshot."""
    kinds = job.kinds()
    begun = max((i for i, kind in enumerate(kinds) if kind == "training"), default=-1)
    if begun < 0 or {"incarnation_ended", "autopsy", "trainers_started"} & {*kinds[begun:]}:
        return False
    heard = job.supervisor.fleet.heartbeats.all()
    trains = len(heard) == NODES and min(one.report.done for one in heard) >= 6
    commits = [e for e in job.events[begun:] if e.kind == "committed"]
    return trains and any(e.fields["level"] == "protected" for e in commits)


@contextmanager
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB more than a trainer has when it enters."""
    counter = oom_counter(os.getpid())
    assert counter is not None, "no memory cgroup can be made here"
    folder = counter.parent / f"megatron-ft-blame-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if (CGROUP_ROOT / "memory").exists() else "memory.max"
        (folder / name).write_text(str(64 << 20))
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def run_job(folder: Path, work: float, drive: Callable[[Job], None]) -> Job:
    """A job in ``folder`` until ``drive``, beside it, ends it."""
    folder.mkdir(parents=True)
    with small_cgroup() as cgroup:
        given = {program.ORDERS: folder, program.WORK: work, program.CGROUP: cgroup}
        job = Job(
            folder, NODES, spares=1, protect=f"xor:{NODES}", networked=True, transport="tcp",
            command=(sys.executable, program.__file__, str(1 << 30)),
            environment={name: str(value) for name, value in given.items()},
            timing=TIMING, hang_seconds=HANG_SECONDS, register_timeout_seconds=200.0,
            quarantine_iterations=0, budget=RestartBudget(1 << 20, 1 << 20, 0.1),
        )  # fmt: skip
        try:
            with suppress(asyncio.CancelledError):
                job.run((1, drive))
        finally:
            job.cluster.destroy()
            assert job.network is not None
            job.network.close()
    return job


def alarms(job: Job, kinds: Collection[str], caused: Collection[int] = ()) -> list[str]:
    """Events of these kinds that no fault has caused."""
    return [e.text for i, e in enumerate(job.events) if e.kind in kinds and i not in caused]


def table(results: Sequence[Result]) -> Iterator[str]:
    yield "| fault | injected | right | unknown | wrong | median s | worst s |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in (*KINDS, ""):
        of = [r for r in results if kind in ("", r.fault.kind)]
        if not of:
            continue
        count = Counter(r.outcome for r in of)
        cells = [len(of), *(count[name] for name in (RIGHT, UNKNOWN, WRONG))]
        seconds = [r.seconds for r in of]
        times = [f"{median(seconds):.1f}", f"{max(seconds):.1f}"] if kind else ["", ""]
        yield " | ".join([f"| {kind or '**all**'}", *map(str, cells), *times]) + " |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support.blame_campaign")
    parser.add_argument("--seed", type=int, default=0, help="draws kinds, ranks and moments")
    parser.add_argument("--faults", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="leave out those before this one")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="only these")
    parser.add_argument("--work", type=float, default=0.04, help="see blamed_training.py")
    parser.add_argument("--clean-minutes", type=float, default=0.0, help="inject nothing")
    parser.add_argument("--json", type=Path, help="write every fault to this file")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="mft-blame-"))
    warm = WarmHost()
    try:
        with trainers_of(warm):
            if given.clean_minutes:
                return _clean(folder / "clean", given)
            return _campaign(folder, given)
    finally:
        warm.close()
        print(f"logs: {folder}")


def _clean(folder: Path, given: argparse.Namespace) -> int:
    def wait(job: Job) -> None:
        time.sleep(60 * given.clean_minutes)
        job.interrupt()

    job = run_job(folder, given.work, wait)
    print(dict(Counter(job.kinds())), "load", os.getloadavg())
    print("\n".join(found := alarms(job, ALARMS)) or "no alarm")
    return 1 if found else 0


def _campaign(folder: Path, given: argparse.Namespace) -> int:
    faults = [f for f in plan(given.seed, given.faults) if f.kind in given.kinds]
    faults = [f for f in faults if f.number >= given.first]
    results, extra = list[Result](), list[str]()

    def record(result: Result) -> None:
        results.append(result)
        one = result.fault
        said = "" if result.outcome == RIGHT else f": {result.found}\n  {result.text}"
        print(
            f"{one.number:3d} {one.kind} ({one.variant}) of rank {one.rank}: "
            f"{result.outcome} after {result.seconds} s{said}",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps([asdict(r) for r in results], indent=1))

    for number in range(0, len(faults), FAULTS_PER_JOB):
        part = faults[number : number + FAULTS_PER_JOB]
        injector = Injector(part, folder / f"job{number}", record)
        try:
            job = run_job(folder / f"job{number}", given.work, injector)
            extra += alarms(job, VERDICTS, injector.caused)
        except (TimeoutError, MegatronFTError) as error:
            print(f"job {number} ended early: {error}")
    print("\n".join([*table(results), "", f"named without a fault: {len(extra)}", *extra]))
    right = sum(r.outcome == RIGHT for r in results)
    if good := 100 * right >= 95 * len(faults) and not extra:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
