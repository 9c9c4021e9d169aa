"""The demo from its first process to its report: protected run, uninterrupted run, comparison."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import Injector, processes, send
from megatron_ft.cli.chaos.job import JobFile
from megatron_ft.cli.chaos.runner import run_oracle
from megatron_ft.cli.chaos.trace import TraceLine, TraceTail, read_trace, trace_path
from megatron_ft.cli.common import say
from megatron_ft.cli.demo import stdlib_corpus
from megatron_ft.cli.demo.faults import DemoFault, DemoStrike, DemoVictim, plan_faults, recoveries
from megatron_ft.cli.demo.report import DemoReport
from megatron_ft.cli.demo.settings import (
    CORPUS_BYTES,
    SNAPSHOT_INTERVAL,
    DemoFolders,
    DemoSettings,
    job_name,
    job_of,
)
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.supervisor.event_log import RecordedEvent

POLL_SECONDS = 0.02
SHOWN_EVERY = 5

STALE = 5 * SNAPSHOT_INTERVAL
"""Iterations by which a protected snapshot may be older than training when a fault strikes.

After a restart captures are skipped until the encoders are up.
"""

# The exit codes of ``megatron-ft run``, for the same ends.
STOPPED = {"UnrecoverableError": 10, "NoSpareError": 11, "RestartBudgetError": 12}

# Commits are counted instead: one line each would bury the rest.
_TOLD = (
    *("trainer_died", "silent", "node_lost", "corrupt", "log", "smp_restarted", "world_broken"),
    *("rebuild_failed", "backoff", "waiting", "spare", "restoring", "from_disk", "from_scratch"),
    "finished",
)


class ProtectedRun:
    """The job under faults: follows its events and rank 0's trace, and strikes when due."""

    def __init__(
        self, job: JobFile, faults: Sequence[DemoFault], iterations: int, log: Callable[[str], None]
    ) -> None:
        self.follower = Follower(job, most_restarts=0)
        self.strikes: list[DemoStrike] = []
        self._job, self._waiting, self._log = job, list(faults), log
        self._iterations = iterations
        self._injector = Injector(self.follower)
        self._tail = TraceTail(trace_path(Path(job.trace), 0))
        self._lines: list[TraceLine] = []
        self._shown = self._incarnation = self._protected_incarnation = 0
        self._committed = -1

    def run(self) -> str:
        """Run the job to its end: "finished" or "stopped".  Nothing of it is left then."""
        self.follower.start()
        try:
            while not (end := self.follower.over()):
                self._read()
                if self._waiting and self._is_due(self._waiting[0]):
                    fault = self._waiting.pop(0)
                    time.sleep(self._seconds_until(fault))
                    self._strike(fault)
                time.sleep(POLL_SECONDS)
            self._read()
            return end
        finally:
            self._injector.tidy()

    def _read(self) -> None:
        self.follower.read()
        for event in self.follower.events[self._shown :]:
            self._incarnation = max(self._incarnation, event["incarnation"])
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
                self._log(f"iteration {done}  snapshot {self._committed}")

    def _take(self, event: RecordedEvent) -> None:
        if event["kind"] in _TOLD:
            self._log(event["text"])
        if event["kind"] == "committed":
            self._committed = event["iteration"]
            recent = not self._lines or event["iteration"] > self._lines[-1].iteration - STALE
            # A job without parity has local commits only.
            if recent and event["level"] == ("protected" if self._job.parity else "local"):
                self._protected_incarnation = self._incarnation

    def _is_first_after(self, strike: DemoStrike, line: TraceLine) -> bool:
        return self._lines[-1].incarnation <= strike.incarnation < line.incarnation

    def _is_due(self, fault: DemoFault) -> bool:
        last = self.strikes[-1].incarnation if self.strikes else 0
        if not last < self._incarnation == self._protected_incarnation or not self._lines:
            return False
        newest = self._lines[-1]
        return newest.incarnation == self._incarnation and newest.iteration >= fault.iteration

    def _seconds_until(self, fault: DemoFault) -> float:
        """Seconds until ``fault.fraction`` of an iteration has passed since the last one's end."""
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


class Demo:
    """One demo; ``run`` it once.  ``faults`` may be changed before."""

    def __init__(self, settings: DemoSettings, folders: DemoFolders) -> None:
        self.settings, self.folders, self._start = settings, folders, time.monotonic()
        self.report = DemoReport(settings)
        self.faults = faults_of(settings)

    def run(self) -> DemoReport:
        """Run everything.  Leaves files in the folders, and nothing else, however it ends.

        A job that cannot be continued is a result and stands in the report.  MegatronFTError
        where something is missing or a run fails by itself.
        """
        try:
            self._run()
        finally:
            self.report.seconds = time.monotonic() - self._start
            shutil.rmtree(self.folders.state, ignore_errors=True)
        return self.report

    def log(self, text: str) -> None:
        """Print a line with the seconds since the demo's start."""
        say(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def _run(self) -> None:
        settings, folders = self.settings, self.folders
        self.log("preparing the training text (the Python library's own sources)")
        text, name = stdlib_corpus.prepare(folders.corpus, CORPUS_BYTES), job_name()
        folders.logs.mkdir(parents=True, exist_ok=True)
        self.log(_title(settings))
        job = job_of(settings, folders, text, name)
        protected = ProtectedRun(job, self.faults, settings.iterations, self.log)
        if not self._train(protected):
            return
        self.log("the same training again, never interrupted: it takes up to a minute")
        run_oracle(job_of(settings, folders, text, f"{name}-o", snapshots=False))
        self._judge(protected)

    def _train(self, run: ProtectedRun) -> bool:
        """Train under faults; whether training ended, as it does unless the job has to stop."""
        report, follower = self.report, run.follower
        try:
            end = run.run()
        finally:
            follower.cluster.destroy()
            ranks = range(self.settings.world_size)
            traces = {rank: read_trace(self.folders.protected, rank) for rank in ranks}
            report.recoveries = recoveries(run.strikes, follower.events, traces)
        if end == "finished":
            return True
        error, text = follower.last_error()
        if error not in STOPPED:
            log = follower.job.place / "supervisor.log"
            raise ControlPlaneError(f"the demo's job stopped: {text}; its supervisor's log: {log}")
        report.exit_code, report.reason = STOPPED[error], text.removeprefix(f"{error}: ")
        return False

    def _judge(self, run: ProtectedRun) -> None:
        from megatron_ft.cli.demo.final_state import compare_runs  # imports torch

        settings, folders, report = self.settings, self.folders, self.report
        self.log("comparing both runs bit by bit")
        report.comparison = compare_runs(
            folders.protected, folders.oracle, settings.world_size, settings.iterations
        )
        missing = len(self.faults) - len(run.strikes)
        if not report.identical:
            report.reason = "the two runs differ"
        elif missing:
            report.reason = (
                f"training ended before {missing} of {len(self.faults)} faults could strike; "
                "give more --iterations"
            )
        else:
            report.exit_code = 0


def faults_of(settings: DemoSettings) -> tuple[DemoFault, ...]:
    """The faults of a demo: all three, or the loss alone where the job is to refuse to continue."""
    faults = plan_faults(
        settings.seed,
        settings.iterations,
        settings.nodes,
        settings.ranks_per_node,
        settings.lose,
    )
    if settings.lose <= settings.scheme.parity_members:
        return faults
    return tuple(fault for fault in faults if fault.kind is DemoVictim.NODE)


def _title(settings: DemoSettings) -> str:
    spares = f"{settings.spares} spare{'s' * (settings.spares != 1)}"
    return (
        f"training with Megatron-LM's loop: {settings.world_size} ranks (tp {settings.tp}, pp "
        f"{settings.pp}, dp {settings.data_parallel}) on {settings.nodes} virtual nodes and "
        f"{spares}, {settings.protect}, seed {settings.seed}"
    )
