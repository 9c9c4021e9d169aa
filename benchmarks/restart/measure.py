"""All trainings in turn, torchrun's restart beside them, and the report."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.restart import nvidia, torchrun
from benchmarks.restart.runs import Restart, restarts
from benchmarks.restart.table import limits, table
from benchmarks.restart.trainings import TRAININGS
from benchmarks.table import Row, markdown
from megatron_ft.core.errors import MegatronFTError

WAYS = (*TRAININGS, torchrun.TORCHRUN, nvidia.NVIDIA)
"""Everything that --only takes."""

INTRODUCTION = """\
The demo's job: 4 ranks on a virtual node each and a spare, rs:3+1, a snapshot every 2 iterations;
{seeds} seeds with three faults each. Seconds from the fault to the end of the first new iteration
of the last rank; parts are medians. torchrun starts the plain loop again from its beginning.
"""


class Report:
    """Results so far, and the reason for each training that was not measured."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self.found: list[Restart] = []
        self.absent: dict[str, str] = {}

    def measure(self, way: str) -> None:
        """Measure one way; what goes wrong with it is noted, and costs no other."""
        try:
            with tempfile.TemporaryDirectory(prefix="megatron-ft-restart-") as folder:
                self.found += _restarts(way, self._seeds, Path(folder))
        except _AbsentError as error:
            self.absent[way] = str(error)
        except (RuntimeError, OSError, MegatronFTError) as error:
            self.absent[way] = f"does not run here: {str(error).strip().splitlines()[0]}"
            print(f"{way}: {error}", file=sys.stderr, flush=True)

    def rows(self) -> list[Row]:
        """Rows with limits."""
        return limits(self.found)

    def text(self, place: str) -> str:
        """Everything in Markdown."""
        about = INTRODUCTION.format(seeds=self._seeds).rstrip()
        tables = [table(self.found, self.absent), markdown(self.rows())]
        return "\n\n".join([place, about, *tables]) + "\n"

    def as_json(self, place: str) -> str:
        """Everything as JSON."""
        restarts = [asdict(one) for one in self.found]
        rows = [{**asdict(row), "median": row.median, "met": row.met} for row in self.rows()]
        data = {"place": place, "restarts": restarts, "rows": rows, "absent": self.absent}
        return json.dumps(data, indent=1) + "\n"


class _AbsentError(Exception):
    """A package that a way needs is not installed."""


def _restarts(way: str, seeds: int, folder: Path) -> Sequence[Restart]:
    if way == torchrun.TORCHRUN:
        return torchrun.restarts(seeds, folder)
    installed = nvidia.installed() if way == nvidia.NVIDIA else TRAININGS[way].installed
    if not installed:
        raise _AbsentError("not installed")
    if way == nvidia.NVIDIA:
        return nvidia.restarts(seeds, folder)
    return restarts(way, TRAININGS[way], seeds, folder)
