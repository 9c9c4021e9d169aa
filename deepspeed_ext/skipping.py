"""The rest of a pass of a torch DataLoader: the same order is drawn, used indices are dropped.

When an iterator is made, torch draws a base seed for its workers (``_BaseDataLoaderIter``), and
at its first index a shuffling sampler draws the permutation.  Both come from the generator of the
process unless they are given another, so both are drawn again here, in this order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader


def resume_torch_loader(
    loader: DataLoader[Any], consumed: int, draws_seed: bool
) -> tuple[DataLoader[Any], Iterator[Any]]:
    """The loader for later passes, and this pass without its first ``consumed`` batches.

    Generators are where they were when the pass began.  ``draws_seed`` is False for a pass
    that reused persistent workers.
    """
    persistent = loader.persistent_workers and loader.num_workers > 0
    seeds = torch.Generator()
    own = loader.generator
    seeds.set_state(torch.get_rng_state() if own is None else own.get_state())
    if draws_seed or not persistent:
        _draw_seed(own)
    which = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = AdvancedSampler(getattr(loader, which), consumed)
    resumed = copy.copy(loader)
    # Past DataLoader's guard against changes, which is there for iterators under way.
    vars(resumed).update({which: sampler, "generator": seeds, "_iterator": None})
    batches = iter(resumed)
    # Persistent workers belong to the loader that started them.
    return (resumed if persistent else loader), batches


def resume_deepspeed_loader(loader: Any, consumed: int) -> Iterator[Any]:
    """A pass of a DeepSpeedDataLoader without its first ``consumed`` batches."""
    begun = torch.get_rng_state()
    _draw_seed(None)
    sampler = loader.data_sampler
    advanced = AdvancedSampler(sampler, consumed * loader.batch_size)
    torch.set_rng_state(begun)
    loader.data_sampler = advanced
    try:
        return iter(loader)
    finally:
        loader.data_sampler = sampler


def _draw_seed(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


class AdvancedSampler:
    """A sampler whose first pass has begun: ``skipped`` items are drawn and dropped right away."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._rest = iter(sampler)
        self._started = False
        next(islice(self._rest, skipped, skipped), None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler) if self._started else self._remaining()

    def _remaining(self) -> Iterator[Any]:
        # Not this object: torch's BatchSampler asks an iterator for itself at every batch.
        self._started = True
        yield from self._rest

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)
