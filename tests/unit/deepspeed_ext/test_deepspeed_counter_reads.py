"""A script's first read of a counter: who is asked, who is not, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed_ext import counter_reads
from deepspeed_ext.checkpoint_engine import Agreement
from deepspeed_ext.counter_reads import CounterReads


class Engine(torch.nn.Module):
    """As DeepSpeed's, with a schedule of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        optimizer = torch.optim.SGD([self.weight], lr=0.5)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def get_lr(self) -> float:
        return float(self.lr_scheduler.optimizer.param_groups[0]["lr"])


def agreements(store: Any, world: int, seconds: float = 5.0) -> list[Agreement]:
    limit = timedelta(seconds=seconds)
    return [Agreement(store, rank, world, limit, "reads") for rank in range(world)]


READS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda engine, name=name: getattr(engine, name)
        for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    },
    "rate": lambda engine: engine.get_lr(),
    "last_epoch": lambda engine: engine.lr_scheduler.last_epoch,
    "get_last_lr": lambda engine: engine.lr_scheduler.get_last_lr(),
}


def restored(engine: Engine) -> None:
    """What a restore sets."""
    engine.global_steps, engine.global_samples = 8, 64
    engine.skipped_steps = engine.micro_steps = 3
    engine.lr_scheduler.load_state_dict({"last_epoch": 8, "_last_lr": [0.25]})
    engine.lr_scheduler.optimizer.param_groups[0]["lr"] = 0.25


@pytest.mark.parametrize("read", READS)
def test_the_first_read_restores_and_gives_what_was_restored(read: str) -> None:
    engine, calls = Engine(), list[bool]()

    def restore(all_came: Callable[[], bool]) -> None:
        calls.append(all_came())
        assert engine.global_steps == 0, "reads of ours end nowhere"
        reads.end()
        restored(engine)

    reads = CounterReads(engine, *agreements(torch.distributed.HashStore(), 1), restore)
    seen = READS[read](engine)
    other = Engine()
    restored(other)
    assert calls == [True] and seen == READS[read](other)
    assert type(engine) is Engine
    assert type(engine.lr_scheduler) is torch.optim.lr_scheduler.StepLR


def test_other_attributes_and_reads_of_frameworks_restore_nothing() -> None:
    engine, calls = Engine(), list[Any]()
    reads = CounterReads(engine, *agreements(torch.distributed.HashStore(), 1), calls.append)
    assert isinstance(engine, Engine) and type(engine).__name__ == "Engine"
    engine.global_steps = 0
    engine.eval()
    engine.lr_scheduler.state_dict()
    inside: dict[str, Any] = {"__name__": "deepspeed.runtime.engine"}
    exec("def read(engine): return engine.global_steps", inside)
    assert inside["read"](engine) == 0 and not calls
    reads.end()
    reads.end()
    assert engine.global_steps == 0 and not calls


def test_all_ranks_are_waited_for() -> None:
    """A restore is collective: nobody begins one that others do not come to."""
    store, came = torch.distributed.HashStore(), list[bool]()
    engines = [Engine(), Engine()]

    def read(rank: int, agreement: Agreement) -> None:
        CounterReads(engines[rank], agreement, lambda all_came: came.append(all_came()))
        assert engines[rank].global_steps == 0

    threads = [threading.Thread(target=read, args=pair) for pair in enumerate(agreements(store, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the ranks did not agree within 20 s"
    assert came == [True, True]


def test_a_read_on_one_rank_alone_restores_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It prints what a fresh start has, says so, and is waited at some times only."""
    engine, came = Engine(), list[bool]()
    own, _ = agreements(torch.distributed.HashStore(), 2, seconds=0.05)
    CounterReads(engine, own, lambda all_came: came.append(all_came()))
    for _ in range(counter_reads.TRIES + 2):
        assert engine.global_steps == 0
    assert came == [False] * counter_reads.TRIES and type(engine) is Engine
    assert "Read it on all ranks" in caplog.text


class Slotted:
    """A schedule that cannot be watched."""

    __slots__ = ("last_epoch",)

    def __init__(self) -> None:
        self.last_epoch = 3


def test_what_cannot_be_watched_is_left_alone() -> None:
    engine = Engine()
    engine.lr_scheduler = Slotted()
    CounterReads(engine, *agreements(torch.distributed.HashStore(), 1), lambda _: None).end()
    assert engine.lr_scheduler.last_epoch == 3 and type(engine.lr_scheduler) is Slotted


def test_nobody_is_asked_where_memory_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FT_RESTORE", "disk")
    engine = Engine()
    CounterReads(engine, *agreements(torch.distributed.HashStore(), 1), pytest.fail)
    assert engine.global_steps == 0 and type(engine) is Engine
