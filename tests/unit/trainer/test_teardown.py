"""Training entered again in one process: what is torn down and restored."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from megatron_ft.cli.demo import demo_model
from megatron_ft.trainer import teardown
from megatron_ft.trainer.package_state import PackageState
from tests.support.deepspeed_cells import Cell, zero
from tests.support.reentries import ENTRIES, Usage
from tests.support.warm_host import Outcome, Request

SOURCE = """
TRAINING = None
REGISTERED = []

GROUPS = {}

class Numbered:
    last = 0
    tracker = {}
    records = []
    known = {"kept": 1}

def number(counted=[0], *, seen={}):
    counted[0] += 1
    seen[counted[0]] = True
    return counted[0], len(seen)

def hidden(function):
    def call(*args):
        return function(*args)
    return call

@hidden
def number_hidden(names=set()):
    names.add(len(names))
    return len(names)
"""


@pytest.fixture
def framework() -> Iterator[Any]:
    """A package of one module that keeps what it does in all places that frameworks use."""
    module = ModuleType("framework_of_test")
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    yield module
    del sys.modules[module.__name__]


def test_a_framework_begins_as_in_a_new_process(framework: Any) -> None:
    framework.number()
    before = PackageState(framework.__name__)
    for _ in range(2):
        framework.TRAINING, framework.Numbered.last = object(), 7
        assert (framework.number(), framework.number()) == ((2, 2), (3, 3))
        assert (framework.number_hidden(), framework.number_hidden()) == (1, 2)
        before.restore()
        assert (framework.TRAINING, framework.Numbered.last) == (None, 0)


def test_registries_and_what_a_script_has_replaced_before_stay(framework: Any) -> None:
    framework.number = lambda: "replaced"
    before = PackageState(framework.__name__)
    framework.REGISTERED.append("imported")
    before.restore()
    assert framework.number() == "replaced" and framework.REGISTERED == ["imported"]


def test_containers_forget_the_state_of_a_training(framework: Any) -> None:
    """Megatron sums the losses of its MTP layers in a dict of a class."""
    numbered = framework.Numbered
    before = PackageState(framework.__name__)
    numbered.tracker["values"] = torch.zeros(1)
    numbered.records.append((torch.nn.Linear(1, 1), "forward"))
    numbered.known.update(kept=2, new=3)
    framework.GROUPS.update({2: [torch.zeros(1)], "entry": object(), "name": "value"})
    numbered.tracker["class"] = framework.GROUPS["class"] = dict
    before.restore()
    assert (numbered.records, numbered.known) == ([], {"kept": 1})
    assert numbered.tracker == {"class": dict}
    assert framework.GROUPS.keys() == {"entry", "name", "class"}


def test_caches_are_emptied_and_mocks_of_absent_packages_do_not_grow(framework: Any) -> None:
    """Megatron has a mock for each name of a package that is not installed."""
    framework.absent, framework.cached = MagicMock(), functools.cache(object)
    before = PackageState(framework.__name__)
    first = framework.cached()
    before.restore()
    assert framework.cached() is not first and framework.absent.mock_calls == []


@pytest.mark.slow
def test_a_loader_in_a_cycle_ends_at_once() -> None:
    """The collection of garbage would wait 5 s for its process."""
    batches: Any = iter(DataLoader(TensorDataset(torch.zeros(9)), num_workers=1))
    next(batches)
    batches.itself, (worker,) = batches, batches._workers
    del batches
    started = time.monotonic()
    teardown._end_loaders()
    assert time.monotonic() < started + 2.5 and worker.exitcode == 0


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
