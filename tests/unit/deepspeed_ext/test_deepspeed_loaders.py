"""ResumableLoader: the batches after a restart are those of a run that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from deepspeed_ext.resumable_loader import DataPosition, ResumableLoader
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import decode, encode
from megatron_ft.trainer.state import RngState

SAMPLES, BATCH, PER_EPOCH, EPOCHS = 10, 2, 5, 4
DATA = list(range(SAMPLES))


class Stream(IterableDataset[int]):
    """Gives each worker its share, shuffled with the generator of the process."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        share = DATA if worker is None else DATA[worker.id :: worker.num_workers]
        yield from (share[i] for i in torch.randperm(len(share)).tolist())


class Shuffling:
    """A batch sampler of a user who knows nothing of torch's generators."""

    def __iter__(self) -> Iterator[list[int]]:
        order = [*DATA]
        random.shuffle(order)
        np.random.shuffle(order)
        yield from (order[i : i + BATCH] for i in range(0, SAMPLES, BATCH))

    def __len__(self) -> int:
        return PER_EPOCH


class Stateful:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        while self._at < PER_EPOCH:
            self._at += 1
            yield self._at
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Read(DataLoader[Any]):
    """A subclass with an iteration of its own can only be read."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def generator() -> Any:
    return torch.Generator().manual_seed(5)


def shared_generator(**options: Any) -> DataLoader[int]:
    own = generator()
    return DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, generator=own), generator=own)


def distributed(**options: Any) -> DataLoader[int]:
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0, seed=3)
    return DataLoader(DATA, BATCH, sampler=sampler, **options)


def batched(sampler: Callable[[], Any], **options: Any) -> DataLoader[int]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler(), BATCH, False), **options)


def random_batches(**options: Any) -> DataLoader[int]:
    return batched(lambda: RandomSampler(DATA), **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "in order": lambda **o: DataLoader(DATA, BATCH, sampler=SequentialSampler(DATA), **o),
    "shuffle": lambda **o: DataLoader(DATA, BATCH, shuffle=True, **o),
    "own generator": lambda **o: DataLoader(DATA, BATCH, shuffle=True, generator=generator(), **o),
    "one generator for all": shared_generator,
    "replacement": lambda **o: DataLoader(
        DATA, BATCH, sampler=RandomSampler(DATA, True, SAMPLES, generator()), **o
    ),
    "weighted": lambda **o: DataLoader(
        DATA, BATCH, sampler=WeightedRandomSampler([1.0 + i for i in DATA], SAMPLES), **o
    ),
    "distributed": distributed,
    "batch sampler": random_batches,
    "user's batch sampler": lambda **o: DataLoader(DATA, batch_sampler=Shuffling(), **o),
    "no batches": lambda **o: DataLoader(DATA, None, sampler=RandomSampler(DATA, False, 5), **o),
    "drop last": lambda **o: DataLoader(DATA[:-1] * 1 + [9, 9], 2, True, drop_last=True, **o),
    "iterable": lambda **o: DataLoader(Stream(), BATCH, **o),
    "subclass": lambda **o: Read(DATA, BATCH, shuffle=True, **o),
    "list": lambda **o: [*range(PER_EPOCH)],
    "stateful": lambda **o: Stateful(),
}


def training(loader: Any, numbered: bool, epochs: int = EPOCHS) -> Iterator[Any]:
    """What a script sees of each batch, and a draw of the model after it."""
    for epoch in range(epochs):
        if numbered:
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            seen = batch.tolist() if isinstance(batch, torch.Tensor) else batch
            yield seen, torch.rand(()).item(), random.random(), np.random.rand()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def interrupted(make: Callable[[], Any], steps: int, numbered: bool) -> tuple[list[Any], bytes]:
    """The first ``steps`` of a run, and what a snapshot behind them holds."""
    seed(1)
    loader = ResumableLoader(make())
    running = training(loader, numbered)
    first = list(islice(running, steps))
    return first, encode((loader.state_dict(), RngState().state_dict()))


def resumed(
    make: Callable[[], Any], snapshot: bytes, numbered: bool, epochs: int = EPOCHS
) -> list[Any]:
    """The rest in a fresh process: nothing is left but the snapshot."""
    seed(99)
    loader = ResumableLoader(make())
    position, states = decode(snapshot)
    loader.load_state_dict(position)
    RngState().load_state_dict(states)
    return list(training(loader, numbered, epochs))


def check(
    make: Callable[[], Any], steps: int, numbered: bool = False, epochs: int = EPOCHS
) -> None:
    seed(1)
    whole = list(training(make(), numbered, epochs))
    first, snapshot = interrupted(make, steps, numbered)
    assert first == whole[:steps], "watching changed what is seen"
    rest = whole[steps:]
    after = resumed(make, snapshot, numbered, epochs)
    assert after[: len(rest)] == rest


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=12, deadline=None)
@given(steps=st.integers(1, PER_EPOCH * EPOCHS - 1))
def test_the_rest_is_that_of_the_uninterrupted_run(name: str, steps: int) -> None:
    check(LOADERS[name], steps)


WORKERS = ("shuffle", "own generator", "user's batch sampler", "iterable")


@pytest.mark.parametrize("steps", [3, PER_EPOCH])
@pytest.mark.parametrize("name", WORKERS)
def test_workers_that_read_ahead_are_not_counted(name: str, steps: int) -> None:
    check(lambda: LOADERS[name](num_workers=2), steps, epochs=2)


@pytest.mark.parametrize("steps", [3, 8])
def test_workers_that_persist_draw_one_seed_in_all(steps: int) -> None:
    check(lambda: LOADERS["shuffle"](num_workers=2, persistent_workers=True), steps, epochs=3)


@pytest.mark.parametrize("steps", [2, PER_EPOCH, 2 * PER_EPOCH, 13])
def test_epochs_that_the_script_counts_from_0_go_on(steps: int) -> None:
    check(distributed, steps, numbered=True)


def test_a_script_that_knows_its_next_epoch_begins_it() -> None:
    seed(1)
    whole = list(training(distributed(), True))
    _, snapshot = interrupted(distributed, PER_EPOCH, True)
    loader = ResumableLoader(distributed())
    loader.load_state_dict(decode(snapshot)[0])
    loader.sampler.set_epoch(1)
    assert [b.tolist() for b in loader] == [seen for seen, *_ in whole[PER_EPOCH : 2 * PER_EPOCH]]


def test_a_pass_that_had_begun_before_the_restore_jumps() -> None:
    seed(1)
    whole = list(training(random_batches(), False))
    _, snapshot = interrupted(random_batches, 7, False)
    seed(99)
    loader = ResumableLoader(random_batches())
    early = iter(loader)
    next(early)
    position, states = decode(snapshot)
    loader.load_state_dict(position)
    RngState().load_state_dict(states)
    assert next(early).tolist() == whole[7][0]
    assert torch.rand(()).item() == whole[7][1]


def test_a_pass_that_was_given_up_is_not_gone_on_with() -> None:
    make = LOADERS["shuffle"]

    def first_of_each_pass(loader: Any) -> Iterator[list[int]]:
        while True:
            yield next(iter(loader)).tolist()

    seed(1)
    whole = list(islice(first_of_each_pass(make()), 6))
    seed(1)
    loader = ResumableLoader(make())
    assert list(islice(first_of_each_pass(loader), 4)) == whole[:4]
    position, states = loader.state_dict(), RngState().state_dict()
    loader = ResumableLoader(make())
    loader.load_state_dict(position)
    RngState().load_state_dict(states)
    assert list(islice(first_of_each_pass(loader), 2)) == whole[4:]


def test_nothing_is_read_to_skip_what_a_sampler_can_skip() -> None:
    read = []

    class Counting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return index

    def make() -> DataLoader[int]:
        return DataLoader(Counting(DATA), BATCH, shuffle=True)

    _, snapshot = interrupted(make, 4, False)
    loader = ResumableLoader(make())
    loader.load_state_dict(decode(snapshot)[0])
    read.clear()
    next(iter(loader))
    assert len(read) == BATCH


def test_a_restore_that_comes_twice_is_the_same() -> None:
    make = LOADERS["shuffle"]
    _, snapshot = interrupted(make, 7, False)
    once = resumed(make, snapshot, False)
    seed(3)
    loader = ResumableLoader(make())
    position, states = decode(snapshot)
    loader.load_state_dict(position)
    again = encode(loader.state_dict())
    loader.load_state_dict(decode(again))
    RngState().load_state_dict(states)
    assert list(training(loader, False)) == once


def test_loaders_made_after_the_restore_get_their_position() -> None:
    seed(1)
    loader = ResumableLoader(DataLoader(DATA, BATCH, shuffle=True), name="late")
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    states = {"late": loader.state_dict()}
    rest = [batch.tolist() for batch in batches]
    del loader, batches
    DataPosition.load_state_dict(SimpleNamespace(), states)  # type: ignore[arg-type]
    seed(7)
    again = ResumableLoader(DataLoader(DATA, BATCH, shuffle=True), name="late")
    assert [batch.tolist() for batch in again] == rest and len(first) == 3


def test_two_loaders_of_one_name_are_refused() -> None:
    loader = ResumableLoader([1], name="train")
    with pytest.raises(ConfigError, match="'train'"):
        ResumableLoader([2], name="train")
    del loader


def test_a_wrapped_loader_is_used_as_the_loader() -> None:
    inner = DataLoader(DATA, BATCH)
    loader = ResumableLoader(inner)
    assert len(loader) == PER_EPOCH and loader.batch_size == BATCH and loader.dataset is DATA
    loader.note = "x"
    assert inner.note == "x"
    assert ResumableLoader(loader).state_dict().keys() == loader.state_dict().keys()
    with pytest.raises(TypeError, match="iter"):
        next(loader)
