"""The position of one data loader, and the rest of an interrupted pass from a fresh loader.

A position is the state of all generators when the pass over the data began, and the number of
batches since.  From these the same order is drawn again, and the batches that were used are
skipped without being read where the loader's sampler can skip.

When an iterator is made, torch draws a base seed for its workers (``_BaseDataLoaderIter``), and
at its first index a shuffling sampler draws the permutation.  Both come from the generator of the
process unless they are given another, so both are drawn again here, in this order.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from megatron_ft.trainer.state import RngState


class LoaderPosition:
    """The position of any iterable that gives the same batches again: they are read and dropped.

    Generators that the loader or its samplers own are set to where the pass began.  Subclasses
    know loaders that need not be read.
    """

    own_state = False
    """True if the position is the loader's own, and counts between passes too."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        samplers = _distinct([getattr(loader, "data_sampler", None), *_torch_samplers(loader)])
        self._generator_owners = [loader, *samplers]
        self._epochs = EpochNumbers(samplers)
        # Held by the training loop; one that was dropped will not be continued.
        self._pass: Callable[[], Pass | None] = lambda: None
        self._passes = 0
        self._pending: dict[str, Any] | None = None

    def begin(self) -> Pass:
        """A new pass over the data, or the rest of the one that a restore brought back."""
        if self._pending is not None and self._next_was_asked_for(self._pending):
            self.set_now(self._pending["now"])
            self._pending = None
        begun = Pass(self)
        self._pass = weakref.ref(begun)
        begun.start()
        return begun

    def is_pending(self, one: Pass) -> bool:
        """True if this pass has to jump to a restored position first."""
        return self._pending is not None and one is self._pass()

    def open(self, one: Pass) -> Iterator[Any]:
        """The batches of a pass, from the restored position if there is one."""
        self._passes += 1
        if self._pending is None:
            one.begun = self._moment()
            return iter(self.loader)
        pending, self._pending = self._pending, None
        one.begun, one.consumed = pending["begun"], pending["consumed"]
        self._epochs.resume(one.begun["epochs"])
        now = RngState().state_dict()
        try:
            RngState().load_state_dict(one.begun["generators"])
            return self._rest(pending)
        finally:
            RngState().load_state_dict(now)

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader."""
        if self._pending is not None:
            return self._pending
        one = self._pass()
        if one is None or one.ended:
            begun, consumed = self._moment(), None
        else:
            begun, consumed = one.begun, one.consumed
        return {"begun": begun, "consumed": consumed, "now": self.now()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ResumableLoader."""
        if state["consumed"] is None and not self.own_state:
            self._epochs.set(state["begun"]["epochs"])
            self.set_now(state["now"])
        else:
            self._pending = {**state, "consumed": state["consumed"] or 0}

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
        ended = pending["consumed"] >= self.length()
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
        batches: Iterator[Any] = iter(self.loader)
        next(islice(batches, consumed, consumed), None)
        return batches

    def handed_out(self) -> None:
        """A batch went to training."""

    def length(self) -> float:
        """Batches in a pass; infinity if nobody knows."""
        try:
            return len(self.loader)
        except TypeError:
            return float("inf")


class TorchPosition(LoaderPosition):
    """A torch DataLoader over a data set with indices: the sampler skips, nothing is read."""

    def _skip(self, consumed: int, first_pass: bool) -> Iterator[Any]:
        loader, own = self.loader, self.loader.generator
        persistent = loader.persistent_workers and loader.num_workers > 0
        seeds = torch.Generator()
        seeds.set_state(torch.get_rng_state() if own is None else own.get_state())
        # A pass that reused persistent workers drew no seed for them.
        if first_pass or not persistent:
            _draw_seed(own)
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = AdvancedSampler(getattr(loader, which), consumed)
        resumed = copy.copy(loader)
        # Past DataLoader's guard against changes, which is there for iterators under way.
        vars(resumed).update({which: sampler, "generator": seeds, "_iterator": None})
        batches: Iterator[Any] = iter(resumed)
        if persistent:  # its workers belong to the loader that started them
            self.loader = resumed
        return batches


class DeepSpeedPosition(LoaderPosition):
    """DeepSpeed's loader, which makes a torch DataLoader for each pass: its sampler skips."""

    def _skip(self, consumed: int, first_pass: bool) -> Iterator[Any]:
        begun, sampler = torch.get_rng_state(), self.loader.data_sampler
        _draw_seed(None)
        advanced = AdvancedSampler(sampler, consumed * self.loader.batch_size)
        torch.set_rng_state(begun)
        self.loader.data_sampler = advanced
        try:
            batches: Iterator[Any] = iter(self.loader)
            return batches
        finally:
            self.loader.data_sampler = sampler


class OwnPosition(LoaderPosition):
    """A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader."""

    own_state = True

    def _holder(self) -> Any:
        return self.loader

    def now(self) -> Any:
        """The loader's own state."""
        return self._holder().state_dict()

    def set_now(self, now: Any) -> None:
        """Hand it back; the next pass continues there."""
        self._holder().load_state_dict(now)

    def _rest(self, place: Mapping[str, Any]) -> Iterator[Any]:
        self.set_now(place["now"])
        return iter(self.loader)


def position_of(loader: Any) -> LoaderPosition:
    """The position of a loader, by what the loader is."""
    deepspeed = sys.modules.get("deepspeed.runtime.dataloader")
    if deepspeed is not None and isinstance(loader, deepspeed.DeepSpeedDataLoader):
        return DeepSpeedPosition(loader)
    # Accelerate's loaders always have the methods, but they work only if this says so.
    calls = [getattr(loader, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, calls)) and getattr(loader, "use_stateful_dataloader", True):
        return OwnPosition(loader)
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(loader, DataLoader) and not own_iteration:
        if not isinstance(loader.dataset, IterableDataset):
            return TorchPosition(loader)
    return LoaderPosition(loader)


class Pass:
    """One iteration over the data; counts what it hands out."""

    def __init__(self, position: LoaderPosition) -> None:
        self._position = position
        self._batches: Iterator[Any] = iter(())
        self.begun: dict[str, Any] = {}
        self.consumed = 0
        self.ended = False

    def start(self) -> None:
        """Open the loader now, as ``iter`` does."""
        self._batches = self._position.open(self)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._position.is_pending(self):
            self.start()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended = True
            raise
        self.consumed += 1
        self._position.handed_out()
        return batch


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


def _draw_seed(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _torch_samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, inner]


def _distinct(objects: Iterable[Any]) -> list[Any]:
    """The objects but None, each once."""
    return list({id(one): one for one in objects if one is not None}.values())
