"""Runs of DeepSpeed's cells."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

from tests.support import resume_runs
from tests.support.arena_folder import ArenaFolder, read_record
from tests.support.deepspeed_cells import Cell
from tests.support.resume_runs import ITERATIONS, SNAPSHOT_AT, TIMEOUT_SECONDS
from tests.support.warm_host import Outcome, Request

SKIPPED = re.compile(r"step (\d+) was skipped")


class Runs(resume_runs.Runs):
    def request(self, layout: Cell, name: str, *flags: str, **variables: object) -> Request:
        folder = str(self.folder / name)
        cell: dict[str, Any] = asdict(layout)
        return Request(
            entry="tests.programs.deepspeed_program:train",
            argv=[json.dumps(cell), str(ITERATIONS), folder, *flags],
            ranks=layout.ranks,
            logs=str(self.folder / name / "logs"),
            timeout_seconds=TIMEOUT_SECONDS,
            environment=self.environment(layout, name, variables),
        )

    def check_whole(self, layout: Cell, whole: Outcome) -> None:
        self._check_stripes()
        if layout.skips:
            skipped = [int(step) for step in SKIPPED.findall(whole.output(0))]
            assert skipped and skipped[0] <= SNAPSHOT_AT < skipped[-1], skipped

    def _check_stripes(self) -> None:
        """Fail unless members of a stripe are data-parallel peers with shards of one size."""
        arenas = ArenaFolder.of(self.folder / "whole" / "arenas")
        for stripe in arenas.stripes:
            places = {member.partition("-dp")[0] for member in stripe.members}
            records = [read_record(arenas.folder, member) for member in stripe.members]
            sizes = {record.tensor_bytes for record in records}
            assert len(places) == len(sizes) == 1, (stripe.members, sizes)
