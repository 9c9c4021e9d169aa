"""Runs of Megatron's layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cli.demo import demo_model
from tests.programs.megatron_program import PLUGINS
from tests.support import resume_runs
from tests.support.megatron_layouts import Layout
from tests.support.resume_runs import ITERATIONS, SNAPSHOT_AT, TIMEOUT_SECONDS
from tests.support.warm_host import Outcome, Request

SNAPSHOTS = "--inmem-snapshot"


@dataclass
class Runs(resume_runs.Runs):
    corpus: Path

    def request(self, layout: Layout, name: str, *flags: str, **variables: object) -> Request:
        arguments = demo_model.demo_arguments(
            iterations=ITERATIONS,
            data_path=self.corpus,
            hidden=32,
            sequence=16,
            precision="fp32",
            distributed_optimizer=False,
        )
        plugins: dict[str, object] = {PLUGINS: " ".join(layout.plugins)}
        return Request(
            entry="tests.programs.megatron_program:train",
            argv=[*arguments, *layout.flags, *flags, "--trace-dir", str(self.folder / name)],
            ranks=layout.ranks,
            logs=str(self.folder / name / "logs"),
            timeout_seconds=TIMEOUT_SECONDS,
            environment=self.environment(layout, name, plugins | variables),
        )

    def check_whole(self, layout: Layout, whole: Outcome) -> None:
        if layout.skips_iterations:
            skipped = skipped_iterations(whole.output(rank) for rank in range(layout.ranks))
            assert skipped and skipped[0] <= SNAPSHOT_AT < skipped[-1], skipped


def skipped_iterations(outputs: Iterable[str]) -> list[int]:
    pattern = re.compile(r"iteration +(\d+)/.*number of skipped iterations: +([1-9])")
    return sorted({int(m.group(1)) for text in outputs for m in pattern.finditer(text)})


def check_resume(runs: Runs, layout: Layout, crash: bool) -> None:
    """As resume_runs.check_resume, with snapshots switched on."""
    resume_runs.check_resume(runs, layout, crash, SNAPSHOTS)
