"""Training entered again in one process: same results, and nothing is left."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.demo import demo_model
from tests.support.deepspeed_cells import Cell, zero
from tests.support.reentries import ENTRIES, Usage
from tests.support.warm_host import Outcome, Request

USAGE = re.compile(
    r"descriptors=(\d+), threads=(\d+), kilobytes=(\d+), allocated=(\d+), objects=(\d+)"
)

NO_RECORDS = {"TORCH_FR_BUFFER_SIZE": "0"}
"""torch's flight recorder keeps the last 2000 collectives, and so grows for fifty entries."""

MANY = pytest.param(50, marks=pytest.mark.all_layouts)


@pytest.mark.deepspeed
@pytest.mark.parametrize("entries", [10, MANY])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(deepspeed_server: Any, tmp_path: Path, stage: int, entries: int) -> None:
    outcome = deepspeed_server.run(
        Request(
            entry="tests.programs.deepspeed_reentry:train",
            argv=[json.dumps(asdict(Cell("reentry", 2, zero(stage, "bf16"))))],
            ranks=2,
            logs=str(tmp_path),
            timeout_seconds=20.0 + 8.0 * entries,
            environment={ENTRIES: str(entries), **NO_RECORDS},
        )
    )
    check(outcome, r"^losses .*$", entries)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("entries", [8, MANY])
def test_megatron(
    megatron_server: Any, megatron_corpus: Path, tmp_path: Path, entries: int
) -> None:
    shape: dict[str, Any] = {"hidden": 32, "sequence": 16, "precision": "fp32"}
    outcome = megatron_server.run(
        Request(
            entry="tests.programs.megatron_reentry:train",
            argv=demo_model.demo_arguments(
                iterations=2, data_path=megatron_corpus, distributed_optimizer=False, **shape
            ),
            ranks=2,
            logs=str(tmp_path),
            timeout_seconds=20.0 + 8.0 * entries,
            environment={ENTRIES: str(entries), **NO_RECORDS},
        )
    )
    check(outcome, r"iteration +2/.*lm loss: (\S+)", entries)


def check(outcome: Outcome, result: str, entries: int) -> None:
    """All entries computed the same, and the last one left no more than the second.

    gloo keeps some 2 KB of each entry.  Arenas of threads fill up within some twenty entries.
    """
    assert not any(outcome.codes), outcome.story()
    losses = [re.findall(result, outcome.output(rank), re.MULTILINE) for rank in range(2)]
    assert any(losses) and all(len(found) in (0, entries) for found in losses), losses
    assert all(len(set(found)) <= 1 for found in losses), losses
    usages = [Usage(*map(int, found)) for found in USAGE.findall(outcome.output(0))]
    second, level, last = usages[1], usages[min(20, entries // 2)], usages[-1]
    assert last.descriptors <= second.descriptors, usages
    assert last.threads <= second.threads + 1, usages
    assert last.objects < second.objects + 20, usages
    assert last.allocated < second.allocated + 300, usages
    assert last.kilobytes < min(second.kilobytes + 3000, level.kilobytes + 1000), usages
