"""Loaders of every kind, stopped anywhere: training uses the samples of a run without a stop."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer import resumable_loader
from megatron_ft.trainer.loader_position import LoaderPosition
from tests.support.loader_runs import Run, continued, numbered, passes, uninterrupted

SAMPLES, BATCH, PER_PASS = 24, 4, 6
DATA = range(SAMPLES)
PLACES = {"start": 1, "middle": 3, "end": PER_PASS, "second pass": 8, "its end": 2 * PER_PASS}
GLOBAL = np.random.default_rng(11)


class Shuffled(Sampler[int]):
    """Shuffles with a generator of any library."""

    def __init__(self, generator: Any) -> None:
        self.held = {"generators": [generator]}

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.held["generators"][0]))


def order_by(generator: Any) -> list[int]:
    """The samples in an order that a generator of any library draws."""
    if isinstance(generator, torch.Generator):
        return list(torch.randperm(SAMPLES, generator=generator).tolist())
    if isinstance(generator, random.Random):
        return generator.sample(DATA, SAMPLES)
    if isinstance(generator, np.random.SeedSequence):
        generator = np.random.default_rng(generator.spawn(1)[0])
    if isinstance(generator, np.random.BitGenerator):
        generator = np.random.Generator(generator)
    return [int(i) for i in generator.permutation(SAMPLES)]


class ShufflesItsList(Shuffled):
    """Shuffles the order of the last pass again."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.random, self.order = random.Random(3), list(range(samples))

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.order)
        return iter(self.order[:SAMPLES])


class Counts(Shuffled):
    """Makes a generator anew from the number of the pass."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        self.number += 1
        return iter(order_by(np.random.default_rng(self.number)))


class InSlots:
    """Counts its passes without a ``__dict__``."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.number += 1
        return iter(order_by(np.random.default_rng(self.number)))


class CountsElsewhere(Shuffled):
    """Keeps the number of the pass in a container."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.kept, dict):
            self.kept["passes"]["begun"] += 1
            number = self.kept["passes"]["begun"]
        elif isinstance(self.kept, set):
            self.kept.add(number := len(self.kept))
        else:
            self.kept.rotate(5)
            number = self.kept[0]
        return iter(order_by(np.random.default_rng(number)))


class DrawsOnTheWay(Shuffled):
    """Draws each sample when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        left = list(DATA)
        while left:
            yield left.pop(self.held["generators"][0].randrange(len(left)))


class UsesGlobal(Shuffled):
    def __init__(self) -> None:
        GLOBAL.bit_generator.state = np.random.default_rng(11).bit_generator.state

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(GLOBAL))


class Batches(BatchSampler):
    """Batches in an order of its own, over a sampler with a generator of its own."""

    def __init__(self) -> None:
        super().__init__(Shuffled(np.random.RandomState(2)), BATCH, False)
        self.random = random.Random(7)

    def __iter__(self) -> Iterator[list[int]]:
        found = [*super().__iter__()]
        self.random.shuffle(found)
        return iter(found)


class Weighted(WeightedRandomSampler):
    def __init__(self) -> None:
        super().__init__([1.0] * SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(4))


class Distributed(DistributedSampler[int]):
    """Turns torch's order by a number of its own."""

    def __init__(self) -> None:
        super().__init__(DATA, num_replicas=2, rank=1, seed=3)
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        found = [*super().__iter__()]
        by = int(self.generator.integers(len(found)))
        return iter(found[by:] + found[:by])


class Knows(Shuffled):
    """Knows its own position, and its pass."""

    def __init__(self) -> None:
        self.place, self.number = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = order_by(np.random.default_rng(self.number))
        while self.place < SAMPLES:
            self.place += 1
            yield order[self.place - 1]
        self.place, self.number = 0, self.number + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.number = state["place"], state["number"]


class Noisy(Dataset[Any]):
    """Samples that are not the same twice: they come with a draw of the data set's generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index + float(self.generator.random())


class Epochs(Noisy):
    """Samples that depend on the epoch, which cannot be read."""

    def __init__(self) -> None:
        self._number = 0

    def set_epoch(self, epoch: int) -> None:
        self._number = epoch

    def __getitem__(self, index: int) -> float:
        return index + SAMPLES * self._number


class Stream(IterableDataset[int]):
    """A stream that shuffles in a buffer, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(9)

    def __iter__(self) -> Iterator[int]:
        buffer = list(DATA[:8])
        for one in [*DATA[8:], *[None] * 8]:
            at = int(self.generator.integers(len(buffer)))
            found = buffer[at]
            if one is None:
                buffer.pop(at)
            else:
                buffer[at] = one
            yield found


class CountedStream(IterableDataset[int]):
    """A stream that begins elsewhere in each pass."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        self.number += 1
        return iter([(one + self.number) % SAMPLES for one in DATA])


def collating(generator: Any) -> Callable[[list[int]], list[float]]:
    def collate(samples: list[int]) -> list[float]:
        return [sample + float(generator.random()) for sample in samples]

    return collate


class ReadsBackwards(DataLoader[Any]):
    """Never asks its sampler."""

    def _get_iterator(self) -> Any:
        return iter([torch.tensor([one]) for one in reversed(DATA[:PER_PASS])])


def by(make: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    return lambda **more: DataLoader(DATA, BATCH, sampler=make(), **options, **more)


LOADERS: dict[str, Callable[..., Any]] = {
    "numpy Generator": by(lambda: Shuffled(np.random.default_rng(0))),
    "numpy RandomState": by(lambda: Shuffled(np.random.RandomState(0))),
    "numpy BitGenerator": by(lambda: Shuffled(np.random.SFC64(0))),
    "numpy SeedSequence": by(lambda: Shuffled(np.random.SeedSequence(0))),
    "random.Random": by(lambda: Shuffled(random.Random(0))),
    "torch.Generator": by(lambda: Shuffled(torch.Generator().manual_seed(0))),
    "a module's generator": by(UsesGlobal),
    "a list that is shuffled": by(ShufflesItsList),
    "a counter": by(Counts),
    "a counter in slots": by(InSlots),
    "a counter in a dict": by(lambda: CountsElsewhere({"passes": {"begun": 0}})),
    "a set that grows": by(lambda: CountsElsewhere(set())),
    "a deque that turns": by(lambda: CountsElsewhere(deque(DATA))),
    "drawn on the way": by(lambda: DrawsOnTheWay(random.Random(0))),
    "a position of its own": by(Knows),
    "weighted": by(Weighted),
    "distributed": by(Distributed),
    "batch sampler": lambda **o: DataLoader(DATA, batch_sampler=Batches(), **o),
    "noisy samples": lambda **o: DataLoader(Noisy(), BATCH, shuffle=True, **o),
    "collate": lambda **o: DataLoader(
        DATA, BATCH, shuffle=True, collate_fn=collating(np.random.default_rng(1)), **o
    ),
    "partial": lambda **o: DataLoader(
        DATA, BATCH, collate_fn=functools.partial(collating(random.Random(1))), **o
    ),
    "shuffled by the process": lambda **o: DataLoader(DATA, BATCH, shuffle=True, **o),
    "a sampler that is not read": lambda **o: ReadsBackwards(DATA, BATCH, shuffle=True, **o),
    "drop last": by(lambda: Shuffled(random.Random(0)), drop_last=True),
}
STREAMS: dict[str, Callable[..., Any]] = {
    "stream": lambda **o: DataLoader(Stream(), BATCH, **o),
    "counted stream": lambda **o: DataLoader(CountedStream(), BATCH, **o),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [*LOADERS, *STREAMS])
def test_the_samples_are_those_of_a_run_without_stop(kind: str, place: str) -> None:
    make = {**LOADERS, **STREAMS}[kind]
    whole = uninterrupted(make, PLACES[place] + 14)
    assert continued(make, PLACES[place], 7, stops=2) == whole


@pytest.mark.parametrize("place", ["middle", "end", "second pass"])
@pytest.mark.parametrize("kind", ["numpy Generator", "noisy samples", "stream"])
def test_so_they_are_with_workers(kind: str, place: str) -> None:
    make = functools.partial({**LOADERS, **STREAMS}[kind], num_workers=2)
    assert continued(make, PLACES[place], 7) == uninterrupted(make, PLACES[place] + 7)


@pytest.mark.parametrize("place", ["middle", "second pass"])
def test_so_they_are_with_workers_that_persist(place: str) -> None:
    make = functools.partial(LOADERS["random.Random"], num_workers=2, persistent_workers=True)
    assert continued(make, PLACES[place], 7) == uninterrupted(make, PLACES[place] + 7)


def test_workers_that_persist_are_made_anew_between_passes() -> None:
    def whole_passes(loader: Any) -> Iterator[Any]:
        while True:
            yield [batch.tolist() for batch in loader]

    make = functools.partial(
        LOADERS["shuffled by the process"], num_workers=1, persistent_workers=True
    )
    expected = uninterrupted(make, 4, whole_passes)
    assert continued(make, 1, 1, whole_passes, stops=3) == expected


class OwnIterator:
    """As DeepSpeed's loader: ``iter`` gives the loader itself, at its begin."""

    def __init__(self) -> None:
        self.data_sampler = RandomSampler(DATA)

    def __iter__(self) -> Any:
        self.batches = iter(DataLoader(DATA, BATCH, sampler=self.data_sampler))
        return self

    def __next__(self) -> Any:
        return next(self.batches)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sampler", ["data_sampler", ""])
def test_a_loader_that_is_its_own_iterator_begins_once(
    sampler: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def position_of(loader: Any) -> LoaderPosition:
        return LoaderPosition(loader, sampler=sampler, items=BATCH)

    monkeypatch.setattr(resumable_loader, "position_of", position_of)
    stop = PLACES[place]
    assert continued(OwnIterator, stop, 7) == uninterrupted(OwnIterator, stop + 7)


@pytest.mark.parametrize("stop", [3, 6, 8, 12])
def test_a_data_set_gets_the_epoch_that_is_true(stop: int) -> None:
    def make() -> Any:
        return DataLoader(Epochs(), BATCH, sampler=DistributedSampler(DATA, 1, 0))

    whole = uninterrupted(make, stop + 14, numbered)
    assert continued(make, stop, 7, numbered, stops=2) == whole


def test_a_data_set_that_listens_is_copied_without_it() -> None:
    import pickle

    run = Run(lambda: DataLoader(Epochs(), BATCH))
    copied = pickle.loads(pickle.dumps(run.loader.dataset))
    copied.set_epoch(3)
    assert copied[0] == 3 * SAMPLES and run.loader.dataset[0] == 0


def test_an_iterator_made_before_a_load_between_passes_begins_anew() -> None:
    make = LOADERS["numpy Generator"]
    run = Run(make)
    used = run.train(PER_PASS)
    assert next(run._data) is not None  # the first pass is over
    run = Run(make)
    for batch in run.loader:
        used.append(batch.tolist())
    snapshot = run.snapshot()
    again = Run(make, seed=5)
    early = iter(again.loader)
    next(early)  # a batch that is not trained on
    again.restored(snapshot)
    assert next(early).tolist() == uninterrupted(make, PER_PASS + 1)[-1]


class Sorted(Shuffled):
    """Gives another order in each process, and nothing tells which."""

    made = 0

    def __init__(self) -> None:
        Sorted.made += 1

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(np.random.default_rng(type(self).made)))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (by(Sorted), by(Sorted), "the first 3 batches of its pass are others than before"),
        (lambda: DataLoader(DATA, 4), lambda: DataLoader(DATA, 8), "batches of 4 then, of 8 now"),
        (
            lambda: DataLoader([[i] for i in DATA], 4, collate_fn=list),
            lambda: [[i] for i in DATA],
            "are others than before",
        ),
        (lambda: [*DATA], lambda: [*reversed(DATA)], "are others than before"),
    ],
)
def test_samples_that_cannot_be_found_again_are_refused(
    first: Callable[[], Any], second: Callable[[], Any], message: str
) -> None:
    run = Run(first)
    run.train(3)
    snapshot = run.snapshot()
    again = Run(second, passes).restored(snapshot)
    with pytest.raises(LayoutMismatchError, match=message):
        again.train(1)
