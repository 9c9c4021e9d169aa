"""The demo from its first process to its report: protected run, uninterrupted run, comparison."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from megatron_ft.cli.demo.inject import Injector, interruptible, run_oracle
from megatron_ft.cli.demo.outcome import outcomes
from megatron_ft.cli.demo.report import Report, compare_runs, node_memory, overhead, versions
from megatron_ft.cli.demo.screen import Screen
from megatron_ft.cli.demo.settings import (
    DemoSettings,
    Fault,
    FaultKind,
    Folders,
    Record,
    job_name,
    job_spec,
    plan_faults,
)
from megatron_ft.cli.demo.trace import TraceLine, read_trace, trace_path
from megatron_ft.core.errors import MegatronFTError, RestartBudgetError, UnrecoverableError
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Supervisor

# The exit codes of ``megatron-ft run``, for the same ends.
STOPPED: dict[type[MegatronFTError], int] = {
    UnrecoverableError: 10,
    NoSpareError: 11,
    RestartBudgetError: 12,
}


class Demo:
    """One demo; ``run`` it once.  ``faults`` may be changed before."""

    def __init__(self, settings: DemoSettings, folders: Folders, screen: Screen) -> None:
        self.settings, self.folders, self.screen = settings, folders, screen
        self.report = Report(settings)
        self.record = Record()
        self._name = job_name()
        self.faults = faults_of(settings)
        self._sampled: set[int] = set()

    def run(self) -> Report:
        """Run everything.  Leaves files in the folders, and nothing else, however it ends.

        A job that cannot go on is a result and stands in the report.  Raises Interrupted,
        and MegatronFTError where something is missing or a run fails by itself.
        """
        started = time.monotonic()
        try:
            self._run()
        finally:
            self.screen.end()
            self.report.events = outcomes(self.record, self.traces(self.folders.protected))
            self.report.state_bytes = max(self.record.tensor_bytes.values(), default=0)
            self.report.seconds = time.monotonic() - started
        return self.report

    def traces(self, folder: Path) -> dict[int, list[TraceLine]]:
        """Every rank's lines in a trace folder."""
        return {rank: read_trace(folder, rank) for rank in range(self.settings.world_size)}

    def _run(self) -> None:
        settings, folders, screen = self.settings, self.folders, self.screen
        screen.say("preparing the training text (the Python library's own sources)")
        text = settings.framework.prepare(settings, folders)
        screen.begin(_title(settings), settings.iterations)
        try:
            self._protected(job_spec(settings, folders, text, self._name))
        except (UnrecoverableError, NoSpareError, RestartBudgetError) as error:
            self.report.exit_code, self.report.reason = STOPPED[type(error)], str(error)
            return
        screen.begin("the same training, never interrupted, as the oracle", settings.iterations)
        oracle = job_spec(settings, folders, text, f"{self._name}-o", snapshots=False)
        trace = trace_path(folders.oracle, 0)
        asyncio.run(interruptible(lambda: run_oracle(oracle, trace, screen.line)))
        screen.end()
        self._judge()

    def _judge(self) -> None:
        settings, folders, report = self.settings, self.folders, self.report
        self.screen.say("comparing both runs bit by bit")
        report.comparison = compare_runs(
            folders.protected, folders.oracle, settings.world_size, settings.iterations
        )
        ours, oracle = (read_trace(folder, 0) for folder in (folders.protected, folders.oracle))
        report.overhead = overhead(self.record, ours, oracle)
        missing = len(self.faults) - len(self.record.strikes)
        if not report.identical:
            report.reason = "the two runs differ"
        elif missing:
            report.reason = (
                f"training ended before {missing} of {len(self.faults)} faults could strike; "
                "give more --iterations"
            )
        else:
            report.exit_code = 0

    def _protected(self, spec: JobSpec) -> None:
        names = [f"node{number}" for number in range(spec.nodes + spec.spares)]
        cluster = VirtualCluster(spec.name, names)
        try:
            self.report.versions = versions(cluster, self.settings.framework)
            with JobState(self.folders.state, spec.name) as state:
                try:
                    asyncio.run(interruptible(lambda: self._train(spec, cluster, state)))
                finally:
                    state.remove()
        finally:
            cluster.destroy()

    async def _train(self, spec: JobSpec, cluster: VirtualCluster, state: JobState) -> None:
        supervisor = Supervisor(spec, cluster, state)
        self.folders.logs.mkdir(parents=True, exist_ok=True)
        log = self.folders.events.open("w")
        samples: set[asyncio.Task[None]] = set()

        def note(event: JobEvent) -> None:
            incarnation = supervisor.coordinator.incarnation
            self.record.note(event, incarnation)
            print(f"{event.monotonic:.3f} {incarnation} {event.text}", file=log, flush=True)
            self.screen.event(event)
            if event.kind == "committed" and incarnation not in self._sampled:
                self._sampled.add(incarnation)
                samples.add(asyncio.create_task(self._sample(cluster)))

        supervisor.observers.add(note)
        supervisor.coordinator.listeners.append(self.record.hear)
        trace = trace_path(self.folders.protected, 0)
        injector = Injector(
            supervisor,
            cluster,
            self.faults,
            trace,
            self.record,
            self.screen.line,
            self.screen.strike,
        )
        job = asyncio.create_task(supervisor.run())
        striking = asyncio.create_task(injector.run())
        try:
            await asyncio.wait({job, striking}, return_when=asyncio.FIRST_COMPLETED)
            if striking.done():
                striking.result()
            await job
        finally:
            for task in (job, striking, *samples):
                task.cancel()
            await asyncio.gather(job, striking, *samples, return_exceptions=True)
            log.close()

    async def _sample(self, cluster: VirtualCluster) -> None:
        nodes = await asyncio.to_thread(node_memory, cluster)
        self.report.memory = nodes or self.report.memory


def faults_of(settings: DemoSettings) -> tuple[Fault, ...]:
    """The faults of a demo: all three, or the loss alone where the job is to refuse to go on."""
    faults = plan_faults(
        settings.seed,
        settings.iterations,
        settings.nodes,
        settings.ranks_per_node,
        settings.lose,
    )
    if settings.lose <= settings.scheme.parity_members:
        return faults
    return tuple(fault for fault in faults if fault.kind is FaultKind.NODE)


def _title(settings: DemoSettings) -> str:
    framework = settings.framework
    spares = f"{settings.spares} spare{'s' * (settings.spares != 1)}"
    return (
        f"training with {framework.title}: {settings.world_size} ranks "
        f"({framework.shape}, dp {settings.data_parallel}) on "
        f"{settings.nodes} virtual nodes and {spares}, {settings.protect}, seed {settings.seed}"
    )
