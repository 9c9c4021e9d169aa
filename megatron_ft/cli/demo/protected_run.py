"""The demo's job under faults: followed from outside, and struck when a fault is due."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import Injector, processes, send
from megatron_ft.cli.chaos.trace import TraceLine, TraceTail, set_gate, trace_path
from megatron_ft.cli.demo.faults import DemoFault, DemoStrike, DemoVictim
from megatron_ft.cli.demo.report import DemoReshape
from megatron_ft.cli.demo.settings import SNAPSHOT_INTERVAL
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import CommittedEvent

POLL_SECONDS = 0.02
SHOWN_EVERY = 5

STALE = 5 * SNAPSHOT_INTERVAL
"""Iterations by which a protected snapshot may be older than training when a fault strikes.

After a restart captures are skipped until the encoders are up.
"""

PATIENCE_SECONDS = 120.0
"""Longest wait of training for encoders, or at its end for a snapshot; a fault strikes then."""

# Commits are counted instead: one line each would bury the rest.
_TOLD = (
    *("trainer_died", "silent", "node_lost", "corrupt", "log", "smp_restarted", "world_broken"),
    *("rebuild_failed", "backoff", "waiting", "spare", "restoring", "from_disk", "from_scratch"),
    *("reshaped", "finished", "replicas_differ", "replicas_unlike", "avoided"),
)


class ProtectedRun:
    """The job under faults: follows its events and rank 0's trace, and strikes when due.

    Training waits for faults, which need snapshots with parity: however slow the machine is, it
    ends only when all have struck.  ``reshape`` is what was measured of a reshape (ReshapedRun).
    """

    def __init__(
        self,
        job: RunCommand,
        trace: Path,
        faults: Sequence[DemoFault],
        iterations: int,
        log: Callable[[str], None],
    ) -> None:
        self.follower = Follower(job, most_restarts=0)
        self.strikes: list[DemoStrike] = []
        self.reshape: DemoReshape | None = None
        self._job, self._waiting, self._log = job.spec, list(faults), log
        self._trace, self._iterations = trace, iterations
        self._injector = Injector(self.follower)
        self._tail = TraceTail(trace_path(trace, 0))
        self._lines: list[TraceLine] = []
        self._shown = self._incarnation = self._protected_incarnation = 0
        self._committed = -1
        self._gate: int | None = None

    def run(self) -> str:
        """Run the job to its end: "finished" or "stopped".  Nothing of it is left then."""
        self._set_gate()
        self.follower.start()
        try:
            return self._run()
        finally:
            self._injector.tidy()

    def _run(self) -> str:
        return self._follow()

    def _follow(self, until: Callable[[], bool] = lambda: False) -> str:
        """Follow the job and strike when due: to its end, or, returning "", to a condition."""
        while not (end := self.follower.over()):
            self._read()
            if self._waiting and self._is_due(self._waiting[0]):
                fault = self._waiting.pop(0)
                time.sleep(self._seconds_until(fault))
                self._strike(fault)
            if until():
                return ""
            self._set_gate()
            time.sleep(POLL_SECONDS)
        self._read()
        return end

    def _read(self) -> None:
        self.follower.read()
        for event in self.follower.events[self._shown :]:
            self._incarnation = max(self._incarnation, event.incarnation)
            self._take(event)
        self._shown = len(self.follower.events)
        for line in self._tail.read():
            if self.strikes and self._is_first_after(self.strikes[-1], line):
                seconds = line.time - self.strikes[-1].wall
                self._log(
                    f"training again: iteration {line.iteration} done {seconds:.1f} s after the "
                    "fault"
                )
            self._lines.append(line)
            if line.iteration % SHOWN_EVERY == 0 or line.iteration == self._iterations:
                loss = "" if line.loss_value is None else f"  loss {line.loss_value:.3f}"
                done = f"{line.iteration:3}/{self._iterations}{loss}"
                self._log(f"iteration {done}  {self._newest_snapshot(line.iteration)}")

    def _take(self, event: LoggedEvent) -> None:
        if event.kind in _TOLD:
            self._log(event.text)
        if isinstance(facts := event.facts, CommittedEvent):
            self._committed = facts.iteration
            recent = not self._lines or facts.iteration > self._lines[-1].iteration - STALE
            # A job without parity has local commits only.
            if recent and facts.level == ("protected" if self._has_parity else "local"):
                self._protected_incarnation = self._incarnation

    @property
    def _has_parity(self) -> bool:
        return self._job.scheme.parity_members > 0

    def _newest_snapshot(self, iteration: int) -> str:
        """The newest commit, and why there is none that is newer if it is old."""
        newest = "no snapshot yet" if self._committed < 0 else f"snapshot {self._committed}"
        if iteration - self._committed <= 2 * SNAPSHOT_INTERVAL:
            return newest
        starting = "new ones wait for the encoders, which are starting"
        return f"{newest} ({'the next is on its way' if self._encoders_up() else starting})"

    def _encoders_up(self) -> bool:
        summary = self.follower.summary()
        up = summary.get("encoders") == "up" and summary["incarnation"] == self._incarnation
        return up or not self._has_parity

    def _is_first_after(self, strike: DemoStrike, line: TraceLine) -> bool:
        return self._lines[-1].incarnation <= strike.incarnation < line.incarnation

    def _is_due(self, fault: DemoFault) -> bool:
        return self._is_ready(fault.iteration) or (
            self._trains_to(self._last_stop) and self._seconds_waited() > PATIENCE_SECONDS
        )

    def _is_ready(self, iteration: int) -> bool:
        """True once the incarnation after the last strike is so far, and protected."""
        return self._incarnation == self._protected_incarnation and self._trains_to(iteration)

    def _trains_to(self, iteration: int) -> bool:
        """True once the incarnation after the last strike has finished an iteration."""
        last = self.strikes[-1].incarnation if self.strikes else 0
        if not self._lines or self._incarnation <= last:
            return False
        newest = self._lines[-1]
        return newest.incarnation == self._incarnation and newest.iteration >= iteration

    def _seconds_waited(self) -> float:
        return time.time() - self._lines[-1].time

    @property
    def _last_stop(self) -> int:
        """The iteration that training finishes, and no later one, while something is to strike."""
        return self._iterations - 1

    def _next(self) -> int | None:
        """The iteration of the next fault, None after the last one."""
        return self._waiting[0].iteration if self._waiting else None

    def _set_gate(self) -> None:
        """Choose the iteration at whose end training waits, if at any."""
        gate = due = self._next()
        if due is not None:
            early = self._trains_to(due) and not (self._is_ready(due) or self._encoders_up())
            gate = due if early and self._seconds_waited() < PATIENCE_SECONDS else self._last_stop
            if gate == due != self._gate:
                self._log(f"training waits at iteration {due} until the encoders are up")
        if gate != self._gate:
            self._gate = gate
            set_gate(self._trace, gate)

    def _seconds_until(self, fault: DemoFault) -> float:
        usual = median(line.seconds for line in self._lines[-5:])
        return max(0.0, self._lines[-1].time + fault.fraction * usual - time.time())

    def _strike(self, fault: DemoFault) -> None:
        """Find the victims first: processes that fall together are killed at once."""
        self._read()
        active = self.follower.active()
        nodes = [active[position] for position in fault.positions]
        rank = fault.positions[0] * self._job.ranks_per_node + fault.local_rank
        pids = processes(self._job.name, "trainer", nodes[0], rank)
        victim, how = f"trainer {rank}, {nodes[0]}", "killed"
        if fault.kind is DemoVictim.NODE:
            victim, how = " and ".join(nodes), "lost: every process killed, memory gone"
        elif fault.kind is DemoVictim.TRAINER_AND_ENCODER:
            encoders = processes(self._job.name, "encoder", nodes[0])
            pids += encoders
            if encoders:  # a world that is being started may have none yet
                victim, how = f"trainer {rank} + encoder, {nodes[0]}", "killed at once"
        monotonic, wall = time.monotonic(), time.time()
        if fault.kind is DemoVictim.NODE:
            self._injector.lose(nodes)
        else:
            send(pids, signal.SIGKILL)
        during = self._lines[-1].iteration + 1
        self.strikes.append(DemoStrike(fault, victim, self._incarnation, during, monotonic, wall))
        self._log(f"FAULT in iteration {during}: {victim} {how}")
