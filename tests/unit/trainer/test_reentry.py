"""Training entered again in one process: same results, and nothing is left."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.deepspeed_cells import Cell, zero
from tests.support.reentries import ENTRIES
from tests.support.warm_host import Request

USAGE = re.compile(r"descriptors=(\d+), threads=(\d+), kilobytes=(\d+), objects=(\d+)")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(deepspeed_server: Any, tmp_path: Path, stage: int) -> None:
    outcome = deepspeed_server.run(
        Request(
            entry="tests.programs.deepspeed_reentry:train",
            argv=[json.dumps(asdict(Cell("reentry", 2, zero(stage, "bf16"))))],
            ranks=2,
            logs=str(tmp_path),
            timeout_seconds=100.0,
            environment={ENTRIES: "10"},
        )
    )
    assert not any(outcome.codes), outcome.story()
    losses = re.findall(r"^losses .*$", outcome.output(0), re.MULTILINE)
    assert len(losses) == 10 and len(set(losses)) == 1
    usages = [tuple(map(int, found)) for found in USAGE.findall(outcome.output(0))]
    second, last = usages[1], usages[-1]
    assert last[0] <= second[0] and last[1] <= second[1] + 1, usages
    assert last[2] < second[2] + 3000 and last[3] < second[3] + 50, usages
