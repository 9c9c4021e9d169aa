"""The demo from its first process to its report: protected run, uninterrupted run, comparison."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

from megatron_ft.cli.chaos.follow import Follower
from megatron_ft.cli.chaos.inject import Injector, processes, send
from megatron_ft.cli.chaos.job import JobFile
from megatron_ft.cli.chaos.oracle import POLL_SECONDS, run_oracle
from megatron_ft.cli.chaos.trace import TraceLine, TraceTail, read_trace, trace_path
from megatron_ft.cli.demo.faults import (
    DemoFault,
    DemoStrike,
    DemoVictim,
    plan_faults,
    recoveries,
)
from megatron_ft.cli.demo.report import DemoReport, NodeMemory, node_memory, overhead, versions
from megatron_ft.cli.demo.screen import Screen
from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, job_name, job_of
from megatron_ft.core.errors import ControlPlaneError

STALL_SECONDS = 600.0

# The exit codes of ``megatron-ft run``, for the same ends.
STOPPED = {"UnrecoverableError": 10, "NoSpareError": 11, "RestartBudgetError": 12}


class ProtectedRun:
    """The job under faults: follows its events and rank 0's trace, and strikes when due."""

    def __init__(self, job: JobFile, faults: Sequence[DemoFault], screen: Screen) -> None:
        self.follower = Follower(job, most_restarts=0)
        self.strikes: list[DemoStrike] = []
        self._job, self._waiting, self._screen = job, list(faults), screen
        self._injector = Injector(self.follower)
        self._tail = TraceTail(trace_path(Path(job.trace), 0))
        self._lines: list[TraceLine] = []
        self._shown = self._incarnation = self._protected_incarnation = 0
        self._progress = time.monotonic()
        self._sampler = ThreadPoolExecutor(1)
        self._samples: list[Future[list[NodeMemory]]] = []

    def run(self) -> str:
        """Run the job to its end: "finished" or "stopped".  Nothing of it is left then.

        ControlPlaneError when it shows no progress any more.
        """
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
            self._sampler.shutdown()

    def memory(self) -> list[NodeMemory]:
        """The memory of every node in the last incarnation that took a snapshot."""
        found = [sample.result() for sample in self._samples]
        return next((nodes for nodes in reversed(found) if nodes), [])

    def _read(self) -> None:
        self.follower.read()
        for event in self.follower.events[self._shown :]:
            self._screen.event(event)
            self._progress = time.monotonic()
            self._incarnation = max(self._incarnation, event["incarnation"])
            if event["kind"] == "committed":
                self._committed(event["level"])
        self._shown = len(self.follower.events)
        for line in self._tail.read():
            self._progress = time.monotonic()
            self._lines.append(line)
            self._screen.line(line)
        if time.monotonic() - self._progress > STALL_SECONDS:
            raise ControlPlaneError(
                f"job {self._job.name}: rank 0 finished no iteration for {STALL_SECONDS:.0f} s; "
                f"see its log in {self._job.place / self._job.logs}"
            )

    def _committed(self, level: str) -> None:
        """Sample the memory once an incarnation; a job without parity has local commits only."""
        if len(self._samples) < self._incarnation:
            cluster = self.follower.cluster
            self._samples.append(self._sampler.submit(node_memory, cluster))
        if level == ("protected" if self._job.parity else "local"):
            self._protected_incarnation = self._incarnation

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
        victim = f"trainer {rank}, {nodes[0]}"
        text = f"trainer of rank {rank} on {nodes[0]} killed"
        if fault.kind is DemoVictim.NODE:
            victim = " and ".join(nodes)
            text = f"{victim} lost: every process killed, memory gone"
        elif fault.kind is DemoVictim.TRAINER_AND_ENCODER:
            encoders = processes(self._job.name, "encoder", nodes[0])
            pids += encoders
            if encoders:  # a world that is being started may have none yet
                victim = f"trainer {rank} + encoder, {nodes[0]}"
                text = f"trainer of rank {rank} and encoder of {nodes[0]} killed at once"
        monotonic, wall = time.monotonic(), time.time()
        if fault.kind is DemoVictim.NODE:
            self._injector.lose(nodes)
        else:
            send(pids, signal.SIGKILL)
        during = self._lines[-1].iteration + 1
        strike = DemoStrike(fault, victim, text, self._incarnation, during, monotonic, wall)
        self.strikes.append(strike)
        self._screen.strike(strike)


class Demo:
    """One demo; ``run`` it once.  ``faults`` may be changed before."""

    def __init__(self, settings: DemoSettings, folders: DemoFolders, screen: Screen) -> None:
        self.settings, self.folders, self.screen = settings, folders, screen
        self.report = DemoReport(settings)
        self.faults = faults_of(settings)

    def run(self) -> DemoReport:
        """Run everything.  Leaves files in the folders, and nothing else, however it ends.

        A job that cannot be continued is a result and stands in the report.  MegatronFTError
        where something is missing or a run fails by itself.
        """
        started = time.monotonic()
        try:
            self._run()
        finally:
            self.screen.end()
            self.report.seconds = time.monotonic() - started
            shutil.rmtree(self.folders.state, ignore_errors=True)
        return self.report

    def traces(self, folder: Path) -> dict[int, list[TraceLine]]:
        """Every rank's lines in a trace folder."""
        return {rank: read_trace(folder, rank) for rank in range(self.settings.world_size)}

    def _run(self) -> None:
        settings, folders, screen = self.settings, self.folders, self.screen
        screen.log("preparing the training text (the Python library's own sources)")
        text, name = settings.framework.prepare(settings, folders), job_name()
        folders.logs.mkdir(parents=True, exist_ok=True)
        screen.begin(_title(settings), settings.iterations)
        protected = ProtectedRun(job_of(settings, folders, text, name), self.faults, screen)
        if not self._train(protected):
            return
        screen.begin("the same training, never interrupted, as the oracle", settings.iterations)
        oracle = job_of(settings, folders, text, f"{name}-o", snapshots=False)
        tail = TraceTail(trace_path(folders.oracle, 0))

        def show_lines() -> None:
            for line in tail.read():
                screen.line(line)

        run_oracle(oracle, show_lines)
        screen.end()
        self._judge(protected)

    def _train(self, run: ProtectedRun) -> bool:
        """Train under faults; whether training ended, as it does unless the job has to stop."""
        report, follower = self.report, run.follower
        try:
            report.versions = versions(follower.cluster, self.settings.framework)
            end = run.run()
        finally:
            follower.cluster.destroy()
            self.screen.end()
            traces = self.traces(self.folders.protected)
            report.recoveries = recoveries(run.strikes, follower.events, traces)
            sizes = (e["tensor_bytes"] for e in follower.events if e["kind"] == "sealed")
            report.state_bytes = max(sizes, default=0)
        report.memory = run.memory()
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
        self.screen.log("comparing both runs bit by bit")
        report.comparison = compare_runs(
            folders.protected, folders.oracle, settings.world_size, settings.iterations
        )
        ours, oracle = (read_trace(folder, 0) for folder in (folders.protected, folders.oracle))
        report.overhead = overhead(run.follower.events, ours, oracle)
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
    framework = settings.framework
    spares = f"{settings.spares} spare{'s' * (settings.spares != 1)}"
    return (
        f"training with {framework.title}: {settings.world_size} ranks "
        f"({framework.shape}, dp {settings.data_parallel}) on "
        f"{settings.nodes} virtual nodes and {spares}, {settings.protect}, seed {settings.seed}"
    )
