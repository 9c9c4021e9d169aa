"""Jobs under the demo's three faults, and what is measured of each restart."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.restart.noted_imports import noted
from benchmarks.restart.trainings import Training
from megatron_ft.cli.chaos.runner import run_oracle
from megatron_ft.cli.chaos.trace import TraceLine, read_trace
from megatron_ft.cli.demo import stdlib_corpus
from megatron_ft.cli.demo.faults import (
    DemoRecovery,
    DemoStrike,
    DemoVictim,
    plan_faults,
    recoveries,
)
from megatron_ft.cli.demo.final_state import compare_runs
from megatron_ft.cli.demo.protected_run import ProtectedRun
from megatron_ft.cli.demo.settings import CORPUS_BYTES, DemoFolders

SHOWN = 8
"""Differences that are printed of each job."""


@dataclass(frozen=True)
class Restart:
    """One fault and the restart after it.

    ``kept`` are ranks whose process is the same after it, of ``survivors``; ``imports`` is how
    often a trainer imported torch; ``identical`` is of the whole job, None if nothing compares.
    """

    training: str
    fault: str
    seconds: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    kept: int = 0
    survivors: int = 0
    imports: int = 0
    identical: bool | None = None


def restarts(name: str, training: Training, seeds: int, folder: Path) -> list[Restart]:
    """Each seed's three restarts, all compared with one uninterrupted run."""
    folders = DemoFolders(folder)
    text = stdlib_corpus.prepare(folders.corpus, CORPUS_BYTES)
    folders.logs.mkdir()
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-{seed}-") as place:
            (inner := DemoFolders(Path(place))).logs.mkdir()
            run = _Faulted(name, training, seed, inner, text)
            run.train()
            if not folders.oracle.exists():
                run_oracle(training.job(0, folders, text, faults=False))
            found += run.measured(folders.oracle)
    return found


class _Faulted:
    """The job of one seed."""

    def __init__(
        self, name: str, training: Training, seed: int, folders: DemoFolders, text: Path
    ) -> None:
        self._name, self._training, self._folders = name, training, folders
        settings = training.settings(seed)
        self._ranks, self._iterations = settings.world_size, settings.iterations
        faults = plan_faults(seed, settings.iterations, settings.nodes)
        self._faults, self._about = len(faults), f"{name}, seed {seed}: "
        self._job = ProtectedRun(
            training.job(seed, folders, text, faults=True),
            folders.protected,
            faults,
            settings.iterations,
            self._log,
        )

    def _log(self, said: str) -> None:
        print(self._about + said, file=sys.stderr, flush=True)

    def train(self) -> None:
        """RuntimeError if the job does not come to its end with all faults."""
        if self._job.run() != "finished":
            raise RuntimeError(f"the job stopped: {self._job.follower.reason()}")
        if len(self._job.strikes) < self._faults:
            raise RuntimeError("training ended before all faults could strike")

    def measured(self, oracle: Path) -> list[Restart]:
        """All restarts, and whether the job ended as the one in ``oracle``."""
        trace = self._folders.protected
        traces = {rank: read_trace(trace, rank) for rank in range(self._ranks)}
        compared = compare_runs(trace, oracle, self._ranks, self._iterations)
        for difference in compared.differences[:SHOWN]:
            self._log(f"DIFFERENT: {difference}")
        strikes = self._job.strikes
        ends = [*(strike.monotonic for strike in strikes), float("inf")]
        recovered = recoveries(strikes, self._job.follower.events, traces)
        imports = noted(trace)
        return [
            self._restart(
                strike,
                one,
                traces,
                sum(begin <= at < end for at in imports),
                identical=compared.identical,
            )
            for strike, one, (begin, end) in zip(strikes, recovered, pairwise(ends), strict=True)
        ]

    def _restart(
        self,
        strike: DemoStrike,
        recovery: DemoRecovery,
        traces: Mapping[int, Sequence[TraceLine]],
        imports: int,
        *,
        identical: bool,
    ) -> Restart:
        lost = len(strike.fault.positions) if strike.fault.kind is DemoVictim.NODE else 1
        return Restart(
            self._name,
            recovery.kind,
            recovery.seconds_to_first_iteration,
            # From the strike, not from when the kernel reported it.
            {**recovery.parts, "detect": recovery.detect or 0.0},
            {kind: len(ranks) for kind, ranks in recovery.starts.items()},
            sum(kept(lines, strike.incarnation) for lines in traces.values()),
            self._ranks - lost,
            imports,
            identical,
        )


def kept(lines: Sequence[TraceLine], incarnation: int) -> bool:
    """True if a rank's process trained in this incarnation and in the one after it."""
    before = [line.pid for line in lines if line.incarnation <= incarnation]
    after = [line.pid for line in lines if line.incarnation > incarnation]
    return before[-1:] == after[:1] != []
