"""The demo from its first process to its report: protected run, uninterrupted run, comparison."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from megatron_ft.cli.chaos.runner import run_oracle
from megatron_ft.cli.chaos.trace import read_trace
from megatron_ft.cli.common import say
from megatron_ft.cli.demo import stdlib_corpus
from megatron_ft.cli.demo.corruption import undone
from megatron_ft.cli.demo.faults import DemoFault, DemoVictim, plan_faults, recoveries
from megatron_ft.cli.demo.protected_run import ProtectedRun
from megatron_ft.cli.demo.report import DemoReport
from megatron_ft.cli.demo.settings import (
    CORPUS_BYTES,
    DemoFolders,
    DemoSettings,
    job_name,
    job_of,
    reshaped_job,
)
from megatron_ft.cli.report.command import write_report
from megatron_ft.cli.run import EXIT_BUDGET, EXIT_NO_SPARE, EXIT_UNRECOVERABLE
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.supervisor.ledger import ledger


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
        say(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def _run(self) -> None:
        settings, folders = self.settings, self.folders
        self.log("preparing the training text (the Python library's own sources)")
        text, name = stdlib_corpus.prepare(folders.corpus, CORPUS_BYTES), job_name()
        folders.logs.mkdir(parents=True, exist_ok=True)
        self.log(_title(settings))
        job = job_of(settings, folders, text, name)
        self.log("the job is this command, which you can run yourself; faults come from outside:")
        say(job.shell())
        protected = self._protected_run(job, text)
        if not self._train(protected):
            return
        self.log("the same training again, never interrupted: it takes up to a minute")
        run_oracle(job_of(settings, folders, text, f"{name}-o", snapshots=False))
        self._judge(protected)

    def _protected_run(self, job: RunCommand, text: Path) -> ProtectedRun:
        settings, trace = self.settings, self.folders.protected
        if settings.reshape is None:
            return ProtectedRun(job, trace, self.faults, settings.iterations, self.log)
        from megatron_ft.cli.demo.reshape import ReshapedRun  # imports torch

        after = reshaped_job(settings, job, self.folders, text)
        return ReshapedRun(job, after, trace, settings, self.faults, self.log)

    def _train(self, run: ProtectedRun) -> bool:
        """Train under faults; whether training ended, as it does unless the job has to stop."""
        report, follower = self.report, run.follower
        try:
            end = run.run()
        finally:
            follower.cluster.destroy()
            ranks = range(max(layout.ranks for layout in self.settings.layouts))
            traces = {rank: read_trace(self.folders.protected, rank) for rank in ranks}
            report.recoveries = recoveries(run.strikes, follower.events, traces)
            events = follower.events
            report.reshape, report.ledger = run.reshape, ledger(events)
            if self.settings.broken is not None:
                report.corruption = undone(self.settings.broken, follower.events)
            if events:
                write_report(self.folders.report, follower.job.spec.name, events)
        if end == "finished":
            return True
        code = follower.code
        if code not in (EXIT_UNRECOVERABLE, EXIT_NO_SPARE, EXIT_BUDGET):
            raise ControlPlaneError(f"the demo's job stopped: {follower.reason()}")
        report.exit_code, report.reason = code, follower.reason()
        return False

    def _judge(self, run: ProtectedRun) -> None:
        settings, folders, report = self.settings, self.folders, self.report
        self.log("comparing both runs bit by bit")
        if settings.reshape is None:
            from megatron_ft.cli.demo.final_state import compare_runs  # imports torch

            report.comparison = compare_runs(
                folders.protected, folders.oracle, settings.world_size, settings.iterations
            )
        elif run.reshape is not None:
            from megatron_ft.cli.demo.reshape import compare_reshaped_runs

            report.comparison = compare_reshaped_runs(settings, folders, run.reshape)
        wanted = len(self.faults) + (settings.reshape is not None)
        missing = wanted - len(run.strikes)
        if report.comparison is not None and not report.identical:
            report.reason = "the two runs differ"
        elif missing:
            report.reason = (
                f"training ended before {missing} of {wanted} faults could strike; "
                "give more --iterations"
            )
        elif report.comparison is None:
            report.reason = "the job continued, but nothing was reshaped"
        elif settings.corrupt and not report.corruption:
            report.reason = "the broken memory was not found and undone"
        else:
            report.exit_code = 0


def faults_of(settings: DemoSettings) -> tuple[DemoFault, ...]:
    """The faults of a demo: all three, or the loss alone where the job is to refuse to continue,
    or none beside a broken memory.
    """
    faults = plan_faults(
        settings.seed,
        settings.iterations,
        settings.nodes,
        settings.ranks_per_node,
        settings.lose,
    )
    if settings.corrupt:
        return ()
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
