"""Ways to read a loader that a count of batches cannot follow: refused by name, or right."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.loader_habits import ReadingPace
from megatron_ft.trainer.resumable_loader import ResumableLoader
from tests.support.loader_runs import Run, continued, passes, seen, uninterrupted

SAMPLES, BATCH, PER_PASS = 24, 4, 6


def shuffled(**options: Any) -> DataLoader[int]:
    own = torch.Generator().manual_seed(5)
    return DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=own, **options)


def in_cycle(loader: Any) -> Iterator[Any]:
    return itertools.cycle(loader)


def in_cycle_of_pairs(loader: Any) -> Iterator[Any]:
    return (batch for batch, _ in itertools.cycle(zip(loader, range(100))))  # noqa: B905


def in_cycle_of_a_function(loader: Any) -> Iterator[Any]:
    def moved() -> Iterator[Any]:
        yield from loader

    return itertools.cycle(enumerate(map(seen, moved())))


@pytest.mark.parametrize("script", [in_cycle, in_cycle_of_pairs, in_cycle_of_a_function])
def test_a_cycle_is_refused_at_the_first_save(script: Callable[..., Any]) -> None:
    run = Run(shuffled, script)
    run.train(1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="itertools.cycle.*while True: yield from loader"):
            run.snapshot()


def keeping(loader: Any) -> Iterator[Any]:
    """A cycle of the user's own."""
    kept = []
    for batch in loader:
        kept.append(batch)
        yield batch
    while True:
        yield from kept


def test_batches_that_are_kept_are_refused_when_the_pass_is_over() -> None:
    run = Run(shuffled, keeping)
    run.train(PER_PASS)
    run.snapshot()
    run.train(1)
    with pytest.raises(ConfigError, match="its pass is over, and no loader was read"):
        run.snapshot()


def test_batches_that_are_read_at_once_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def at_once(loader: Any) -> Iterator[Any]:
        return itertools.cycle(list(loader))

    run = Run(shuffled, at_once)
    run.train(2)
    run.snapshot()
    assert "its pass is over, and no loader was read" in caplog.text


def limited(loader: Any) -> Iterator[Any]:
    while True:
        yield from map(seen, itertools.islice(loader, 4))


def limited_within(loader: Any) -> Iterator[Any]:
    while True:
        for _, batch in itertools.islice(enumerate(map(seen, loader)), 4):
            yield batch


@pytest.mark.parametrize("script", [limited, limited_within])
def test_a_limit_that_counts_anew_is_warned_of_at_the_restart(
    caplog: pytest.LogCaptureFixture, script: Callable[..., Any]
) -> None:
    run = Run(shuffled, script)
    run.train(2)
    snapshot = run.snapshot()
    assert "counts its limit anew" not in caplog.text, "it is right in the first process"
    again = Run(shuffled, script, seed=2).restored(snapshot)
    again.train(1)
    again.snapshot()
    assert "continues behind batch 2, and itertools.islice counts its limit anew" in caplog.text


def endless_with_names(loader: Any) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from zip(itertools.repeat(epoch - epoch), loader)  # noqa: B905


@pytest.mark.parametrize("stop", [1, 5, 6, 9, 12])
@pytest.mark.parametrize(
    "script",
    [
        endless_with_names,
        lambda loader: enumerate(passes(loader), 7),
        lambda loader: itertools.chain.from_iterable(itertools.repeat(loader)),
    ],
)
def test_other_iterators_around_it_are_right(script: Callable[..., Any], stop: int) -> None:
    def unnumbered(loader: Any) -> Iterator[Any]:
        return (one[1] if isinstance(one, tuple) else one for one in script(loader))

    assert continued(shuffled, stop, 9, unnumbered) == uninterrupted(shuffled, stop + 9, unnumbered)


def read_by_a_thread(loader: Any) -> Iterator[Any]:
    ready: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        for batch in itertools.islice(passes(loader), 30):
            ready.put(batch)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield ready.get(timeout=30)


def test_a_thread_that_reads_ahead_is_refused_at_the_first_save() -> None:
    run = Run(shuffled, read_by_a_thread)
    run.train(1)
    with pytest.raises(ConfigError, match="another thread reads it"):
        run.snapshot()
    run.train(10)  # so that the thread ends


def one_ahead(loader: Any) -> Iterator[Any]:
    batches = passes(loader)
    following = next(batches)
    while True:
        batch, following = following, next(batches)
        yield batch


def test_a_program_that_reads_a_batch_ahead_is_refused() -> None:
    run = Run(shuffled, one_ahead)
    run.train(3)
    with pytest.raises(ConfigError, match="the first iteration read 1 batches more"):
        run.snapshot()


def test_it_is_refused_at_the_first_save_behind_a_restart() -> None:
    run = Run(shuffled)
    run.train(3)
    again = Run(shuffled, one_ahead).restored(run.snapshot())
    again.train(1)
    with pytest.raises(ConfigError, match="the first iteration read 1 batches more"):
        again.snapshot()


@pytest.mark.parametrize(
    ("read", "ahead"),
    [
        ([4, 4, 4, 4], 0),
        ([6, 4, 4, 4], 2),
        ([5, 4, 6, 4, 4], 0),  # a number that depends on the batches
        ([1, 0, 0, 1, 0, 0], 0),  # several steps on a batch
        ([9, 4, None, 4], 5),
        ([None, 4, 4], 0),
    ],
)
def test_what_points_to_reading_ahead(read: list[int | None], ahead: int) -> None:
    pace = ReadingPace()
    for batches in read:
        pace.iteration_ended(batches or 0, whole=batches is not None)
    assert pace.ahead == ahead


def test_two_iterators_in_turn_are_refused() -> None:
    run = Run(shuffled, lambda loader: (a for a, _ in zip(loader, loader)))  # noqa: B905
    run.train(2)
    with pytest.raises(ConfigError, match="two iterators read it in turn"):
        run.snapshot()


def looking_on_the_way(loader: Any) -> Iterator[Any]:
    """Passes, with another iterator now and then that is not trained on."""
    while True:
        for number, batch in enumerate(loader):
            yield batch
            if number in (1, 4):
                next(iter(loader))
            if number == 2:
                list(loader)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_look_within_an_iteration_leaves_the_place(stop: int) -> None:
    make: Callable[[], Any] = shuffled
    expected = uninterrupted(make, stop + 3, looking_on_the_way)
    run = Run(make, looking_on_the_way)
    run.train(stop)
    assert Run(make, seed=3).restored(run.snapshot()).train(1) == expected[: stop + 1]


def test_a_look_behind_a_restart_leaves_the_place(caplog: pytest.LogCaptureFixture) -> None:
    def looking_first(loader: Any) -> Iterator[Any]:
        next(iter(loader))
        return passes(loader)

    whole = uninterrupted(shuffled, 15, looking_first)
    assert continued(shuffled, 4, 11, looking_first) == whole
    assert "continues there. Read before load()" in caplog.text


class Lazy(Sampler[int]):
    """Draws each sample from the process's generator."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(SAMPLES) for _ in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class LazyStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(Lazy())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(SAMPLES), BATCH, sampler=Lazy()),
        lambda: DataLoader(LazyStream(), BATCH),
    ],
)
def test_draws_that_mix_with_those_of_training_are_refused(make: Callable[[], Any]) -> None:
    run = Run(make)
    run.train(3)
    with pytest.raises(ConfigError, match="draw from a generator of its own"):
        run.snapshot()


class Unsound(Sampler[int]):
    def __init__(self, part: Any) -> None:
        self.part = part

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.part, list):
            random.shuffle(self.part)
            return iter(self.part[:SAMPLES])
        return iter(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Noisy(list[int]):
    def __init__(self) -> None:
        super().__init__(range(SAMPLES))
        self.random = random.Random(1)

    def __getitem__(self, index: Any) -> Any:
        return index + self.random.random()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataLoader(range(SAMPLES), BATCH, sampler=Unsound(random.SystemRandom())),
            "DataLoader.sampler.part draws from the operating system",
        ),
        (
            lambda: DataLoader(range(9999), BATCH, sampler=Unsound(list(range(9999)))),
            "passes change DataLoader.sampler.part, which is too long",
        ),
        (
            lambda: DataLoader(range(SAMPLES), BATCH, num_workers=1, in_order=False),
            "in_order=False gives batches as workers finish them",
        ),
        (
            lambda: DataLoader(Noisy(), BATCH, num_workers=1, persistent_workers=True),
            "persistent workers keep the data set of the first pass",
        ),
    ],
)
def test_loaders_that_cannot_repeat_a_pass_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    run = Run(make)
    run.train(1)
    loader = iter(run.loader)
    with pytest.raises(ConfigError, match=message):
        run.snapshot()
    del loader


def test_a_loader_that_is_not_for_training_is_no_hindrance() -> None:
    run = Run(shuffled)
    evaluation = ResumableLoader(shuffled(), name="evaluation")
    for _ in range(3):
        run.train(2)
        assert len(list(evaluation)) == PER_PASS
        run.snapshot(), evaluation.state_dict()
    run.train(4)
    run.snapshot(), evaluation.state_dict()
