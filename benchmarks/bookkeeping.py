"""What save() takes of the training thread where users call it: whole jobs of each framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.jobs import Jobs, supervised
from benchmarks.table import Row

CAPTURES = 4
"""In a round: a save takes milliseconds."""

LIMIT_MS = 5.0
"""One per cent of an iteration of 0.5 s."""


@dataclass(frozen=True)
class Program:
    """One of benchmarks.frameworks, and its row's name.

    ``module`` is what it imports, of the distribution that has to be installed for it; where there
    is none, torch is enough, and it gets the device to train on.
    """

    name: str
    row: str
    distribution: str = ""
    module: str = ""

    @property
    def installed(self) -> bool:
        """True if this method can run here."""
        try:
            return not self.module or find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a package above
            return False


PLAIN = Program("plain_api", "save() of a module and its AdamW")
DEEPSPEED = Program("deepspeed_engine", "save() of DeepSpeed's engine", "deepspeed", "deepspeed")
MEGATRON = Program(
    "megatron_loop", "save() in Megatron's loop", "megatron-core", "megatron.training"
)


def parts(jobs: Jobs) -> Iterator[Iterator[Row]]:
    """One job each.  On a GPU only what trains there: the frameworks' programs do not."""
    yield measured(PLAIN, jobs)
    if jobs.device == "cpu":
        yield measured(DEEPSPEED, jobs)
        yield measured(MEGATRON, jobs)


def measured(program: Program, jobs: Jobs) -> Iterator[Row]:
    """The calls of save() in iterations in which a snapshot is captured, the first ones left out.

    A row without samples where its framework is not installed.
    """
    if not program.installed:
        yield _row(program, (), f"not measured: no {program.distribution} is installed")
        return
    with jobs.folder() as folder:
        out = folder / "measured.json"
        command = [sys.executable, "-m", f"benchmarks.frameworks.{program.name}"]
        command += [str(out), str(CAPTURES * jobs.rounds)]
        command += [] if program.module else [jobs.device]
        supervised(command, 1, folder, jobs.limit_seconds)
        found = json.loads(out.read_text())
    yield _row(program, tuple(1000 * seconds for seconds in found["seconds"]), found["note"])


def _row(program: Program, calls: tuple[float, ...], note: str) -> Row:
    return Row(program.row, calls, "ms", LIMIT_MS, more=False, note=note)
