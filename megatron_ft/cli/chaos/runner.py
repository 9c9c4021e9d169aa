"""One case from an empty folder to its verdict."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.cases import Case, Chance
from megatron_ft.cli.chaos.follow import Follower, until
from megatron_ft.cli.chaos.inflict import Inflicter
from megatron_ft.cli.chaos.judge import Story, Verdict, judge
from megatron_ft.cli.chaos.settings import Settings
from megatron_ft.cli.chaos.trace import Lines, read_traces
from megatron_ft.core.fault_plan import (
    ARMED_NAME,
    SOCKET_NAME,
    FaultPlan,
    PointFault,
    PointReached,
)

STRIKE, PROVOKE, REPEATED = "strike", "provoke", "repeated"
CLOCK_STEP_SECONDS = 3600.0
DELAY_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """One case and what became of it."""

    case: Case
    story: Story
    verdict: Verdict
    seconds: float
    tail: str
    folder: Path


def run_case(case: Case, settings: Settings, oracle: Mapping[int, Lines]) -> Outcome:
    """Run one case; nothing of it is left but its folder, and not that if all was well."""
    name = f"chaos-{time.monotonic_ns() % 10**9}"
    folder = settings.folder / name
    folder.mkdir(mode=0o700, parents=True)
    started = time.monotonic()
    outcome = asyncio.run(_Case(case, settings, name, folder).run(oracle))
    if outcome.verdict.good:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(outcome, seconds=time.monotonic() - started)


class _Case:
    """The state of a case that runs."""

    def __init__(self, case: Case, settings: Settings, name: str, folder: Path) -> None:
        self.case, self.settings, self.folder = case, settings, folder
        self.job = settings.job(case, name, folder)
        self.chance = Chance.of(case, settings.seed, settings.nodes)
        self.arrived = asyncio.Event()

    async def run(self, oracle: Mapping[int, Lines]) -> Outcome:
        FaultPlan(tuple(self._strikes())).write(self.folder)
        server = await asyncio.start_unix_server(self._meet, self.folder / SOCKET_NAME)
        self.follower = Follower(self.job)
        self.inflicter = Inflicter(self.case, self.chance, self.follower)
        self.inflicter.surroundings.prepare()
        self.follower.start()
        try:
            end, reason = await self._drive()
        except TimeoutError as error:
            end, reason = "hang", str(error)
        finally:
            self.follower.read()
            self.inflicter.tidy()
            server.close()
        return self._outcome(end, reason, oracle)

    def _outcome(self, end: str, reason: str, oracle: Mapping[int, Lines]) -> Outcome:
        error, text = self.follower.last_error() if end == "stopped" else ("", reason)
        story = Story(
            parity=self.job.parity,
            events=self.follower.events,
            strikes=self.inflicter.strikes,
            traces=read_traces(self.folder / "trace", self.settings.ranks),
            oracle=oracle,
            reached=self.arrived.is_set(),
            end=end,
            reason=text,
            error=error,
            disk=self.job.drain_interval > 0,
        )
        return Outcome(self.case, story, judge(story), 0.0, self.follower.tail(), self.folder)

    def _strikes(self) -> list[PointFault]:
        case, chance = self.case, self.chance
        node = self.job.node_names[chance.position]
        steady = case.at.occasion in ("training", "smp lost") and case.at.role != "supervisor"
        own = case.victim == case.at.role and case.fault != "stop"
        seconds = CLOCK_STEP_SECONDS if case.fault == "clock" else DELAY_SECONDS
        strikes = [
            PointFault(
                STRIKE,
                case.point,
                nth=chance.nth,
                node=node if steady else "",
                action=case.fault if own else "",
                seconds=seconds,
            )
        ]
        if case.at.occasion == "capture given up":
            strikes.append(PointFault(PROVOKE, "capture.copied", node=node, action="exception"))
        if (case.victim, case.fault) == ("disk", "slow"):
            slow = PointFault(REPEATED, "drain.writing", action="delay", seconds=0.5, repeat=True)
            strikes.append(slow)
        return strikes

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process is at a point; it goes on when its connection is answered."""
        arrival = msgspec.json.decode(await reader.readline(), type=PointReached)
        if arrival.fault == STRIKE:
            self.follower.read()
            self.inflicter.strike(arrival)
            self.arrived.set()
        elif arrival.fault == PROVOKE:
            self.inflicter.note(f"exception in a capture on {arrival.node}")
        writer.write(b"go\n")
        writer.close()

    async def _drive(self) -> tuple[str, str]:
        """The case from start to end: how it ended, and why."""
        limit, follower = self.settings.limit, self.follower
        await until(lambda: self._ready() or self._over(), limit, lambda: "a protected snapshot")
        (self.folder / ARMED_NAME).touch()
        self.inflicter.provoke()
        await until(
            lambda: self.arrived.is_set() or self._over(),
            limit,
            lambda: f"{self.case.point} to be reached",
        )
        await until(lambda: self._settled() or self._over(), limit, self._missing)
        if self._end == "stopped" and follower.last_error()[0] == self._expected_error:
            # What was missing is there again, and the user runs the same command again.
            await until(self.inflicter.cured, limit, self._missing)
            self._end = ""
            follower.start()
            await until(lambda: self._settled() or self._over(), limit, self._missing)
        (self.folder / "stop").touch()
        patience = 3600.0 if self.settings.command else limit
        await until(self._over, patience, lambda: "the job to end")
        return self._end, follower.last_error()[1]

    _end = ""

    @property
    def _expected_error(self) -> str:
        """With what the job may stop until it is helped."""
        return "NoSpareError" if self.case.victim == "memory" else "none"

    def _over(self) -> bool:
        self.follower.read()
        self._end = self._end or self.follower.over()
        return bool(self._end)

    def _ready(self) -> bool:
        """Whether there is something to lose."""
        drained = not self.job.drain_interval or self.follower.count("drained") > 0
        if (self.case.victim, self.case.fault) == ("disk", "full"):
            drained = self.follower.count("drain_failed") > 0
        return drained and self.follower.protected_commits() >= 2

    def _settled(self) -> bool:
        """Whether the job has come to rest since the last thing that was done to it."""
        inflicter, follower = self.inflicter, self.follower
        if not inflicter.cured():
            return False
        drains = self.case.at.occasion == "drain" or self.case.victim == "disk"
        drained = not drains or follower.count("drained", inflicter.quiet) > 0
        if self.case.at.occasion == "export":
            drained = follower.count("exported", inflicter.quiet) > 0
        return drained and follower.protected_commits(inflicter.quiet) >= 2

    def _missing(self) -> str:
        waiting = [cure.get_name() for cure in self.inflicter.cures if not cure.done()]
        done = self.follower.protected_commits(self.inflicter.quiet)
        wanted = ", ".join([f"2 protected snapshots after the fault ({done} so far)", *waiting])
        return f"{wanted}; the last events:\n{self.follower.tail()}"
