"""Running a chaos case, from its plan to the verdict, and the oracle that it is compared with.

The oracle is the same training with no fault, whose every bit a faulted run must have.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.cases import Case, Chance
from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.inject import CaseInjector
from megatron_ft.cli.chaos.job import ChaosSettings, JobFile
from megatron_ft.cli.chaos.judge import Story, Verdict, judge
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.fault_plan import (
    ARMED_NAME,
    SOCKET_NAME,
    FaultPlan,
    PointFault,
    PointReached,
)
from megatron_ft.core.process_tools import last_lines
from megatron_ft.supervisor.processes import TrainerFleet

STRIKE, PROVOKE = "strike", "provoke"
DELAY_SECONDS = 1.0
USERS_PATIENCE_SECONDS = 3600.0
"""A user's training does not read the file at which ours stops."""


@dataclass(frozen=True)
class CaseOutcome:
    """One case and what became of it."""

    case: Case
    story: Story
    verdict: Verdict
    seconds: float
    tail: str
    folder: Path


def run_case(case: Case, settings: ChaosSettings, oracle: Mapping[int, Lines]) -> CaseOutcome:
    """Run one case; nothing of it is left but its folder, and not that if all was well."""
    name = f"chaos-{time.monotonic_ns() % 10**9}"
    folder = settings.folder / name
    folder.mkdir(mode=0o700, parents=True)
    started = time.monotonic()
    outcome = asyncio.run(_CaseRun(case, settings, name, folder).run(oracle))
    if outcome.verdict.good:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(outcome, seconds=time.monotonic() - started)


def job_of(case: Case, settings: ChaosSettings, name: str, folder: Path) -> JobFile:
    """The job of a case: with spares for what it loses, with drains where they play a part."""
    spares = case.nodes_lost() + (case.victim == "smp")
    spares += case.at.role == "smp" or case.at.occasion == "smp lost"
    job = settings.job(name, folder, max(1, spares))
    drains = case.nodes_lost() > job.parity or "drain" in (case.at.role, case.victim)
    return msgspec.structs.replace(job, drain_interval=10 if drains and case.disk else 0)


class _CaseRun:
    """The state of a case that runs."""

    def __init__(self, case: Case, settings: ChaosSettings, name: str, folder: Path) -> None:
        self.case, self.settings, self.folder = case, settings, folder
        self.job = job_of(case, settings, name, folder)
        self.chance = Chance.of(case, settings.seed, settings.nodes)
        self.arrived = asyncio.Event()
        self.ended = ""

    async def run(self, oracle: Mapping[int, Lines]) -> CaseOutcome:
        FaultPlan(tuple(self._faults())).write(self.folder)
        server = await asyncio.start_unix_server(self._meet, self.folder / SOCKET_NAME)
        self.follower = Follower(self.job)
        self.injector = CaseInjector(self.case, self.chance, self.follower)
        self.follower.start()
        try:
            end, reason = await self._drive()
        except TimeoutError as error:
            end, reason = "hang", str(error)
        finally:
            self.follower.read()
            self.injector.tidy()
            server.close()
        name, text = self.follower.last_error() if end == "stopped" else ("", reason)
        story = Story(
            parity=self.job.parity,
            events=self.follower.events,
            strikes=self.injector.strikes,
            traces=read_traces(self.folder / "trace", self.settings.ranks),
            oracle=oracle,
            reached=self.arrived.is_set(),
            end=end,
            reason=text,
            error=name,
            disk=self.job.drain_interval > 0,
        )
        return CaseOutcome(self.case, story, judge(story), 0.0, self.follower.tail(), self.folder)

    def _faults(self) -> list[PointFault]:
        """The plan: where processes stand still, and what they then do to themselves."""
        case, chance = self.case, self.chance
        node = self.job.node_names[chance.position]
        steady = case.at.occasion in ("training", "smp lost") and case.at.role != "supervisor"
        own = case.victim == case.at.role and case.fault != "stop"
        faults = [
            PointFault(
                STRIKE,
                case.point,
                nth=chance.nth,
                node=node if steady else "",
                action=case.fault if own else "",
                seconds=DELAY_SECONDS,
            )
        ]
        if case.at.occasion == "capture given up":
            faults.append(PointFault(PROVOKE, "capture.copied", node=node, action="exception"))
        return faults

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process is at a point; it continues when its connection is answered."""
        reached = msgspec.json.decode(await reader.readline(), type=PointReached)
        if reached.fault == STRIKE:
            self.follower.read()
            self.injector.strike(reached)
            self.arrived.set()
        elif reached.fault == PROVOKE:
            self.injector.record(f"exception in a capture on {reached.node}")
        writer.write(b"go\n")
        writer.close()

    async def _drive(self) -> tuple[str, str]:
        """The case from start to end: how it ended, and why."""
        await self._until(self._ready, lambda: "a protected snapshot")
        (self.folder / ARMED_NAME).touch()
        self.injector.provoke()
        await self._until(self.arrived.is_set, lambda: f"{self.case.point} to be reached")
        await self._until(self._settled, self.injector.missing)
        (self.folder / "stop").touch()
        patience = USERS_PATIENCE_SECONDS if self.settings.command else self.settings.limit
        await until(self._over, patience, lambda: "the job to end")
        return self.ended, self.follower.last_error()[1]

    async def _until(self, condition: Callable[[], bool], whom: Callable[[], str]) -> None:
        await until(lambda: condition() or self._over(), self.settings.limit, whom)

    def _over(self) -> bool:
        self.follower.read()
        self.ended = self.ended or self.follower.over()
        return bool(self.ended)

    def _ready(self) -> bool:
        """True if there is something to lose."""
        drained = not self.job.drain_interval or self.follower.count("drained") > 0
        return drained and self.follower.protected_commits() >= 2

    def _settled(self) -> bool:
        """True if the job has come to rest since the last thing that was done to it."""
        quiet, follower = self.injector.quiet, self.follower
        if self.injector.curing():
            return False
        drained = self.case.at.occasion != "drain" or follower.count("drained", quiet) > 0
        return drained and follower.protected_commits(quiet) >= 2


class OracleError(MegatronFTError):
    """The uninterrupted run failed, so there is nothing to compare with."""


def oracle_traces(settings: ChaosSettings) -> dict[int, Lines]:
    """The traces of an uninterrupted run; {} if the command writes none.  See run_oracle."""
    folder = settings.folder / "oracle"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    # Not beside the arenas of jobs: no running process would show whose folder it is.
    (root := folder / "memory").mkdir(mode=0o700)
    job = settings.job(f"oracle-{time.monotonic_ns()}", folder)
    command = settings.command or settings.training(None)
    run_oracle(msgspec.structs.replace(job, command=command, root=str(root), bare=True))
    return read_traces(folder / "trace", settings.ranks)


def run_oracle(job: JobFile) -> None:
    """Run the job's command on all ranks to its end; OracleError if a rank fails.

    No SMP and no encoder is started.  No process is left, however it ends.
    """
    asyncio.run(_run(job))


async def _run(job: JobFile) -> None:
    cluster = job.cluster()
    fleet = TrainerFleet(cluster, job.spec())
    try:
        fleet.start(job.node_names[: job.nodes], 1, {})
        first = await fleet.ended()
        if not first.finished:
            log = fleet.log_of(first.rank)
            raise OracleError(
                f"the uninterrupted run failed: rank {first.rank} ended with {first.status}; "
                f"end of {log}:\n{last_lines(log)}"
            )
    finally:
        await fleet.kill_all()
        cluster.destroy()
