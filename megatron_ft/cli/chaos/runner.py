"""Running a chaos case, from its plan to the verdict, and the oracle that it is compared with.

The oracle is the same training with no fault, whose every bit a faulted run must have.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos import trace
from megatron_ft.cli.chaos.cases import Case, Chance
from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.inject import CaseInjector
from megatron_ft.cli.chaos.judge import Story, Verdict, judge
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.cli.run_command import PROGRAM, RunCommand
from megatron_ft.core import fault_points
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.fault_plan import (
    ARMED_NAME,
    SOCKET_NAME,
    FaultPlan,
    PointFault,
    PointReached,
)
from megatron_ft.core.process_tools import free_port, last_lines
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.supervisor.processes import TrainerPlace

TRAINING_MODULE = "megatron_ft.cli.chaos.training"
STRIKE, PROVOKE = "strike", "provoke"
DELAY_SECONDS = 1.0
ITERATION_SECONDS = 0.03
USERS_PATIENCE_SECONDS = 3600.0
"""A user's training does not read the file at which ours stops."""


@dataclass(frozen=True)
class ChaosSettings:
    """Settings that all cases of one command share: ``flags`` of ``megatron-ft run``, and more.

    ``command`` is the user's own, or empty; ``limit`` how long a case may wait for any one
    thing, in seconds.  ``python`` are the words that start the Python of our own training,
    ``program`` those that start ``megatron-ft``.
    """

    folder: Path
    flags: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    limit: float = 60.0
    iterations: int = 1000
    command: tuple[str, ...] = ()
    python: tuple[str, ...] = (sys.executable,)
    program: tuple[str, ...] = PROGRAM

    def job(self, name: str, folder: Path, more: Mapping[str, object]) -> RunCommand:
        places = {"--state-dir": folder / "state", "--log-dir": folder / "logs"}
        usual = {"--nodes": 2, "--protect": "xor:2", "--slots": 2, "--lease-seconds": 4.0}
        variables = {trace.VARIABLE: str(folder / "trace"), "OMP_NUM_THREADS": "1"}
        return RunCommand(
            {"--job": name, **usual, "--warm-start": "off", **places, **self.flags, **more},
            self.command or self.training(folder / "stop"),
            variables,
            self.program,
        )

    def training(self, stop: Path | None) -> tuple[str, ...]:
        """Our own training, at a pace and until the file ``stop`` is there, or without either."""
        command = (*self.python, "-m", TRAINING_MODULE, "--iterations", str(self.iterations))
        pace = ("--seconds", str(ITERATION_SECONDS), "--stop", str(stop))
        return (*command, *(pace if stop else ()))


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


def job_of(case: Case, settings: ChaosSettings, name: str, folder: Path) -> RunCommand:
    """The job of a case: with spares for what it loses, with drains where they play a part."""
    spares = case.nodes_lost() + (case.victim == "smp")
    spares += case.at.role == "smp" or case.at.occasion == "smp lost"
    job = settings.job(name, folder, {"--spares": max(1, spares)})
    drains = "drain" in (case.at.role, case.victim)
    drains |= case.nodes_lost() > job.spec.scheme.parity_members
    if drains and case.disk:
        disk = {"--drain-dir": folder / "disk", "--drain-interval": 10}
        job = replace(job, flags={**job.flags, **disk})
    return replace(job, variables={**job.variables, fault_points.VARIABLE: str(folder)})


class _CaseRun:
    """The state of a case that runs."""

    def __init__(self, case: Case, settings: ChaosSettings, name: str, folder: Path) -> None:
        self.case, self.settings, self.folder = case, settings, folder
        self.job = job_of(case, settings, name, folder)
        self.chance = Chance.of(case, settings.seed, self.job.spec.nodes)
        self.drains = self.job.spec.settings.drain_dir is not None
        self.arrived = asyncio.Event()
        self.ended = ""

    async def run(self, oracle: Mapping[int, Lines]) -> CaseOutcome:
        FaultPlan(tuple(self._faults())).write(self.folder)
        server = await asyncio.start_unix_server(self._meet, self.folder / SOCKET_NAME)
        follower = self.follower = Follower(self.job)
        self.injector = CaseInjector(self.case, self.chance, follower)
        follower.start()
        try:
            await self._drive()
            end, reason = self.ended, follower.reason() if self.ended == "stopped" else ""
        except TimeoutError as error:
            end, reason = "hang", str(error)
        finally:
            follower.read()
            self.injector.tidy()
            server.close()
        spec = self.job.spec
        story = Story(
            parity=spec.scheme.parity_members,
            events=follower.events,
            strikes=self.injector.strikes,
            traces=read_traces(self.folder / "trace", spec.nodes * spec.ranks_per_node),
            oracle=oracle,
            reached=self.arrived.is_set(),
            end=end,
            reason=reason,
            code=follower.code or 0,
            disk=self.drains,
        )
        return CaseOutcome(self.case, story, judge(story), 0.0, follower.tail(), self.folder)

    def _faults(self) -> list[PointFault]:
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

    async def _drive(self) -> None:
        await self._until(self._ready, lambda: "a protected snapshot")
        (self.folder / ARMED_NAME).touch()
        self.injector.provoke()
        await self._until(self.arrived.is_set, lambda: f"{self.case.point} to be reached")
        await self._until(self._settled, self.injector.missing)
        (self.folder / "stop").touch()
        patience = USERS_PATIENCE_SECONDS if self.settings.command else self.settings.limit
        await until(self._over, patience, lambda: "the job to end")

    async def _until(self, condition: Callable[[], bool], whom: Callable[[], str]) -> None:
        await until(lambda: condition() or self._over(), self.settings.limit, whom)

    def _over(self) -> bool:
        self.follower.read()
        self.ended = self.ended or self.follower.over()
        return bool(self.ended)

    def _ready(self) -> bool:
        drained = not self.drains or self.follower.count("drained") > 0
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
    job = settings.job("oracle", folder, {})
    run_oracle(replace(job, training=settings.command or settings.training(None)))
    return read_traces(folder / "trace", job.spec.nodes * job.spec.ranks_per_node)


def run_oracle(job: RunCommand) -> None:
    """Train alone what the job trains: its ranks as torchrun would start them, nothing of ours.

    OracleError if a rank fails.  No process is left, however it ends.
    """
    spec, ranks = job.spec, list[LocalProcess]()
    base, port = base_environment(job.environment()), free_port()
    try:
        for rank in range(spec.nodes * spec.ranks_per_node):
            node, local = divmod(rank, spec.ranks_per_node)
            place = TrainerPlace(
                node, local, spec.nodes, spec.ranks_per_node, "127.0.0.1", port, spec.name, 0
            )
            log = spec.log_dir / f"rank{rank}.log"
            ranks.append(LocalProcess.spawn("", spec.command, place.of_rank(base), log))
        running = True
        while running:
            time.sleep(0.02)
            running = any(process.alive() for process in ranks)
            for rank, process in enumerate(ranks):
                _require_success(rank, process, spec.log_dir / f"rank{rank}.log")
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def _require_success(rank: int, process: LocalProcess, log: Path) -> None:
    if not process.alive() and (status := process.join(0)):
        raise OracleError(
            f"the uninterrupted run failed: rank {rank} ended with {status}; end of {log}:\n"
            f"{last_lines(log)}"
        )
