"""The position of one data loader, and the rest of an interrupted pass from a fresh loader.

A position is the state of all generators when the pass over the data began, and the number of
batches since.  From these the same order is drawn again, and the batches that were used are
skipped without being read where the loader's sampler can skip.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer.state import RngState

logger = logging.getLogger(__name__)

awaiting_batch: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose ``reading()`` is called before a pass gives its first batch: the pass continues
from what that restores."""

SHARED_ANEW = "shared_anew"
"""Key of a position that ranks of another number take: their batches a step, and the old ones'."""


class LoaderPosition:
    """The position of any iterable that gives the same batches again: they are read and dropped.

    Generators that the loader or its samplers own are set to where the pass began.
    """

    own_state = False
    """True if the position is the loader's own, and counts between passes too."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        samplers = samplers_of(loader)
        # But Accelerate's seedable sampler, which makes and seeds its own in every pass.
        self._generator_owners = [
            owner for owner in (loader, *samplers) if not hasattr(owner, "initial_seed")
        ]
        self._epochs = EpochNumbers(samplers)
        self._passes = 0
        self._begun: dict[str, Any] = {}
        # Batches that the newest pass has handed out; None if it is over or was given up.
        self._consumed: int | None = None
        self._pending: dict[str, Any] | None = None

    def begin(self) -> Iterator[Any]:
        """A new pass over the data, or the rest of the one that a restore brought back."""
        if self._pending is not None and self._next_was_asked_for(self._pending):
            self.set_now(self._pending["now"])
            self._pending = None
        self._passes += 1
        return self._batches(self._passes, self._open())

    def _batches(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        """Count what a pass hands out; it jumps to a position that is restored meanwhile."""
        end = object()
        for one in [*awaiting_batch]:
            one.reading()
        try:
            while True:
                if self._pending is not None and number == self._passes:
                    batches = self._open()
                batch = next(batches, end)
                if batch is end:
                    return
                if number == self._passes and self._consumed is not None:
                    self._consumed += 1
                yield batch
        finally:
            # Also when the training loop has dropped it: nobody will continue it.
            if number == self._passes:
                self._consumed = None

    def _open(self) -> Iterator[Any]:
        if self._pending is None:
            self._begun, self._consumed = self._moment(), 0
            return iter(self.loader)
        pending, self._pending = self._pending, None
        self._begun, self._consumed = pending["begun"], pending["consumed"]
        self._epochs.resume(self._begun["epochs"])
        now = RngState().state_dict()
        try:
            RngState().load_state_dict(self._begun["generators"])
            return self._rest(pending)
        finally:
            RngState().load_state_dict(now)

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader."""
        if self._pending is not None:
            return self._pending
        begun = self._moment() if self._consumed is None else self._begun
        return {"begun": begun, "consumed": self._consumed, "now": self.now()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ResumableLoader; LayoutMismatchError if ranks of another number cannot share it."""
        if SHARED_ANEW in state:
            state = self._shared_anew(state, *state[SHARED_ANEW])
        if state["consumed"] is None and not self.own_state:
            self._epochs.set(state["begun"]["epochs"])
            self.set_now(state["now"])
        else:
            self._pending = {**state, "consumed": state["consumed"] or 0}

    def _shared_anew(self, state: Mapping[str, Any], now: int, before: int) -> dict[str, Any]:
        """The position of ranks that read ``now`` batches where the old ones read ``before``."""
        kept = {key: value for key, value in state.items() if key != SHARED_ANEW}
        if now == before or kept["consumed"] is None:
            return kept
        if not any(isinstance(owner, DistributedSampler) for owner in self._generator_owners):
            raise LayoutMismatchError(
                f"the position of a {type(self.loader).__name__} cannot be shared by another "
                "number of ranks, because no DistributedSampler deals out its samples: give "
                "training_data to deepspeed.initialize, or start with the old number of ranks"
            )
        consumed, rest = divmod(kept["consumed"] * now, before)
        if rest:
            logger.warning(
                "the step crossed an epoch: up to %d batches a rank are read a second time", now
            )
        return {**kept, "consumed": consumed}

    def _moment(self) -> dict[str, Any]:
        """All that decides the order of a pass that begins now."""
        return {
            "generators": RngState().state_dict(),
            "epochs": self._epochs.current(),
            "first": self._passes <= 1,
            "own": None if self.own_state else self.now(),
        }

    def _next_was_asked_for(self, pending: Mapping[str, Any]) -> bool:
        # A script that knows its epoch begins the next one if it had finished this.
        try:
            ended = pending["consumed"] >= len(self.loader)
        except TypeError:  # nobody knows how many there are
            ended = False
        return ended and self._epochs.asks_for_next(pending["begun"]["epochs"])

    def now(self) -> Any:
        """States of the loader's own generators, on which later passes depend."""
        return [generator.get_state() for generator in self._own_generators()]

    def set_now(self, now: Any) -> None:
        """Set what ``now`` gave."""
        for generator, state in zip(self._own_generators(), now, strict=True):
            generator.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        found = _distinct(getattr(owner, "generator", None) for owner in self._generator_owners)
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _rest(self, place: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of the pass at ``place``; the process's generators are those at its begin."""
        self.set_now(place["begun"]["own"])
        return self._skip(place["consumed"], place["begun"]["first"])

    def _skip(self, consumed: int, first_pass: bool) -> Iterator[Any]:
        return dropped(iter(self.loader), consumed)


class SamplerPosition(LoaderPosition):
    """A loader whose sampler, its attribute ``name``, gives ``items`` for each batch: it skips."""

    def __init__(self, loader: Any, name: str, items: int) -> None:
        super().__init__(loader)
        self._name, self._items = name, items

    def _skip(self, consumed: int, first_pass: bool) -> Iterator[Any]:
        with skipping(self.loader, self._name, consumed * self._items, first_pass) as sampler:
            # As before: torch draws a seed for workers, and then the sampler its order.
            batches: Iterator[Any] = iter(self.loader)
            sampler.advance()
            return batches


class OwnPosition(LoaderPosition):
    """A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader."""

    own_state = True

    def now(self) -> Any:
        """The loader's own state."""
        return self.loader.state_dict()

    def set_now(self, now: Any) -> None:
        """Hand it back; the next pass continues there."""
        self.loader.load_state_dict(now)

    def _rest(self, place: Mapping[str, Any]) -> Iterator[Any]:
        self.set_now(place["now"])
        return iter(self.loader)


@contextmanager
def skipping(loader: Any, name: str, items: int, first_pass: bool) -> Iterator[SkippingSampler]:
    """Make a loader's sampler, its attribute ``name``, drop so many items in a pass that begins
    inside the block."""
    # Not setattr: DataLoader guards against changes while an iterator is under way.
    attributes = vars(loader)
    sampler = SkippingSampler(attributes[name], items)
    changed: dict[str, Any] = {name: sampler}
    if attributes.get("persistent_workers"):
        attributes["_iterator"] = None
        if not first_pass:  # it reused workers, and drew no seed for them
            changed["generator"] = torch.Generator()
    before = {key: attributes[key] for key in changed}
    attributes.update(changed)
    try:
        yield sampler
    finally:
        attributes.update(before)


def sampler_name(loader: Any) -> str:
    """The attribute of torch's DataLoader that gives an item for each batch, '' if none does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def position_of(loader: Any) -> LoaderPosition:
    """The position of a loader, by what the loader is."""
    deepspeed = sys.modules.get("deepspeed.runtime.dataloader")
    if deepspeed is not None and isinstance(loader, deepspeed.DeepSpeedDataLoader):
        return SamplerPosition(loader, "data_sampler", loader.batch_size)
    # Accelerate's loaders always have the methods, but they work only if this says so.
    calls = [getattr(loader, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, calls)) and getattr(loader, "use_stateful_dataloader", True):
        return OwnPosition(loader)
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if not own_iteration and (name := sampler_name(loader)):
        return SamplerPosition(loader, name, 1)
    return LoaderPosition(loader)


class EpochNumbers:
    """The epochs of samplers that have ``set_epoch``, seen through the script's own counting.

    After a restore a script may begin again at its first number.  So the difference between
    its number and the true one is kept, and added to its later numbers.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [s for s in samplers if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        self._said = self.current()
        self._offset = [0] * len(self._samplers)
        for index, sampler in enumerate(self._samplers):
            sampler.set_epoch = self._listening(index, sampler.set_epoch)

    def _listening(self, index: int, original: Callable[[int], None]) -> Callable[[int], None]:
        def set_epoch(epoch: int) -> None:
            self._said[index] = epoch
            original(epoch + self._offset[index])

        return set_epoch

    def current(self) -> list[int]:
        """The true epochs."""
        return [sampler.epoch for sampler in self._samplers]

    def set(self, epochs: Sequence[int]) -> None:
        """Put the samplers at these, until the script sets others."""
        for sampler, epoch in zip(self._samplers, epochs, strict=True):
            sampler.epoch = epoch

    def resume(self, epochs: Sequence[int]) -> None:
        """Continue in these epochs, whatever number the script has for them."""
        self._offset = [epoch - said for epoch, said in zip(epochs, self._said, strict=True)]
        self.set(epochs)

    def asks_for_next(self, epochs: Sequence[int]) -> bool:
        """True if the script has set the numbers that follow these."""
        return bool(epochs) and self._said == [epoch + 1 for epoch in epochs]


class SkippingSampler:
    """A sampler whose first pass drops ``skipped`` items; ``advance`` does so before it is read."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped
        self._rest: Iterator[Any] | None = None
        self._is_read = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler) if self._is_read else self._remaining()

    def advance(self) -> None:
        """Begin the pass, unless workers have asked for its first items already."""
        if self._rest is None:
            self._rest = dropped(iter(self._sampler), self._skipped)

    def _remaining(self) -> Iterator[Any]:
        # Not this object: torch's BatchSampler asks an iterator for itself at every batch.
        self.advance()
        self._is_read = True
        yield from self._rest or ()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # Accelerate's loader sets the epoch of its sampler as a pass begins.
        return getattr(vars(self)["_sampler"], name)


def dropped(items: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator, without its first items."""
    next(islice(items, count, count), None)
    return items


def samplers_of(loader: Any) -> list[Any]:
    """All samplers of a loader, and those in them, from the outermost on."""
    found: list[Any] = []
    left = [loader]
    while left:
        names = ("data_sampler", "sampler", "batch_sampler")
        inner = _distinct(getattr(one, name, None) for one in left for name in names)
        left = [one for one in inner if all(one is not other for other in found)]
        found += left
    return found


def _distinct(objects: Iterable[Any]) -> list[Any]:
    """The objects but None, each once."""
    return list({id(one): one for one in objects if one is not None}.values())
