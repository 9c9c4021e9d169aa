"""How the rest of an interrupted pass is made from a fresh loader, for each kind of loader.

Epoch numbers of samplers, which scripts set by counting and may count from 0 in each incarnation.

The rest of a pass of a torch DataLoader: the same order is drawn, used indices are dropped.

When an iterator is made, torch draws a base seed for its workers (``_BaseDataLoaderIter``), and
at its first index a shuffling sampler draws the permutation.  Both come from the generator of the
process unless they are given another, so both are drawn again here, in this order.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from deepspeed_ext.curriculum import CurriculumSampler


def samplers_of(loader: Any) -> list[Any]:
    """The samplers that a loader draws from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (
        getattr(loader, "data_sampler", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found: list[Any] = []
    for one in candidates:
        if one is not None and not any(one is other for other in found):
            found.append(one)
    return found


class EpochNumbers:
    """The epochs of samplers that have ``set_epoch``, seen through the script's own counting.

    After a restore a script may begin again at its first number.  So the difference between
    what it says and what was true is kept, and added to what it says later.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [s for s in samplers if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        self._said = [sampler.epoch for sampler in self._samplers]
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
        """Put the samplers at these, until the script says otherwise."""
        for sampler, epoch in zip(self._samplers, epochs, strict=True):
            sampler.epoch = epoch

    def resume(self, epochs: Sequence[int]) -> None:
        """Continue in these epochs, whatever number the script has for them."""
        self._offset = [epoch - said for epoch, said in zip(epochs, self._said, strict=True)]
        self.set(epochs)

    def asks_for_next(self, epochs: Sequence[int]) -> bool:
        """True if the script has said the numbers that follow these."""
        return bool(epochs) and all(
            said == epoch + 1 for epoch, said in zip(epochs, self._said, strict=True)
        )


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


Resumed = tuple[Any, Iterator[Any]]
"""The loader for later passes, and the rest of this one."""


class Kind(Protocol):
    """What differs between loaders."""

    continues: bool
    """The position is the loader's own, and counts between passes too."""

    def moment(self, loader: Any) -> dict[str, Any]:
        """What the order depends on beside the process's generators, as a pass begins."""

    def now(self, loader: Any) -> Any:
        """What must be the same for the passes to come."""

    def set_now(self, loader: Any, now: Any) -> None:
        """Set what ``now`` gave."""

    def resume(self, loader: Any, begun: Mapping[str, Any], place: Mapping[str, Any]) -> Resumed:
        """The rest of the pass; the process's generators are those at its begin."""

    def handed_out(self, loader: Any) -> None:
        """A batch went to training."""

    def length(self, loader: Any) -> float:
        """Batches in a pass; infinity if nobody knows."""


class Replayed:
    """Any iterable that gives the same batches again: they are read and dropped.

    Generators that the loader or its samplers own are set to where the pass began.
    """

    continues = False

    def moment(self, loader: Any) -> dict[str, Any]:
        """States of the loader's own generators."""
        return {"own": self.now(loader)}

    def now(self, loader: Any) -> Any:
        """States of the loader's own generators."""
        return [generator.get_state() for generator in _own_generators(loader)]

    def set_now(self, loader: Any, now: Any) -> None:
        """Set them."""
        for generator, state in zip(_own_generators(loader), now, strict=True):
            generator.set_state(state)

    def resume(self, loader: Any, begun: Mapping[str, Any], place: Mapping[str, Any]) -> Resumed:
        """Read and drop what was used."""
        self.set_now(loader, begun["own"])
        return self._rest(loader, begun, place["consumed"])

    def _rest(self, loader: Any, begun: Mapping[str, Any], consumed: int) -> Resumed:
        batches = iter(loader)
        next(islice(batches, consumed, consumed), None)
        return loader, batches

    def handed_out(self, loader: Any) -> None:
        """Counting is enough."""

    def length(self, loader: Any) -> float:
        """As the loader says."""
        try:
            return len(loader)
        except TypeError:
            return float("inf")


class TorchLoader(Replayed):
    """A torch DataLoader over a data set with indices: the sampler skips, nothing is read."""

    def _rest(self, loader: Any, begun: Mapping[str, Any], consumed: int) -> Resumed:
        return resume_torch_loader(loader, consumed, begun["first"])


class DeepSpeedLoader(Replayed):
    """DeepSpeed's loader, which makes a torch DataLoader for each pass: its sampler skips."""

    def _rest(self, loader: Any, begun: Mapping[str, Any], consumed: int) -> Resumed:
        return loader, resume_deepspeed_loader(loader, consumed)


class CurriculumLoader:
    """DeepSpeed's loader under a curriculum: the sampler carries its own position.

    With workers the sampler runs ahead, so its state is kept for each batch on its way.
    """

    continues = True

    def __init__(self, loader: Any) -> None:
        loader.data_sampler = CurriculumSampler(loader.data_sampler)

    def moment(self, loader: Any) -> dict[str, Any]:
        """Nothing beside the sampler's state."""
        return {}

    def now(self, loader: Any) -> Any:
        """The sampler's state after the last batch that was handed out."""
        return loader.data_sampler.position()

    def set_now(self, loader: Any, now: Any) -> None:
        """Set it; the next pass goes on from there."""
        loader.data_sampler.set_position(now)

    def resume(self, loader: Any, begun: Mapping[str, Any], place: Mapping[str, Any]) -> Resumed:
        """A new pass of the sampler, put at its old place."""
        self.set_now(loader, place["now"])
        return loader, iter(loader)

    def handed_out(self, loader: Any) -> None:
        """The sampler's state of that batch is the current one."""
        loader.data_sampler.handed_out()

    def length(self, loader: Any) -> float:
        """A curriculum has no passes."""
        return float("inf")


class SelfResuming(Replayed):
    """A loader with ``state_dict`` and ``load_state_dict`` (StatefulDataLoader): it knows best."""

    continues = True

    def moment(self, loader: Any) -> dict[str, Any]:
        """Nothing; all is in the loader's own state."""
        return {}

    def now(self, loader: Any) -> Any:
        """The loader's own state."""
        return loader.state_dict()

    def set_now(self, loader: Any, now: Any) -> None:
        """Hand it back."""
        loader.load_state_dict(now)

    def resume(self, loader: Any, begun: Mapping[str, Any], place: Mapping[str, Any]) -> Resumed:
        """What the loader makes of its state."""
        self.set_now(loader, place["now"])
        return loader, iter(loader)


def kind_of(loader: Any) -> Kind:
    """Choose by what the loader is."""
    deepspeed = sys.modules.get("deepspeed.runtime.dataloader")
    if deepspeed is not None and isinstance(loader, deepspeed.DeepSpeedDataLoader):
        return CurriculumLoader(loader) if loader.curriculum_learning_enabled else DeepSpeedLoader()
    # Accelerate's loaders always have the methods, but they work only if this says so.
    calls = [getattr(loader, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, calls)) and getattr(loader, "use_stateful_dataloader", True):
        return SelfResuming()
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(loader, DataLoader) and not own_iteration:
        if not isinstance(loader.dataset, IterableDataset):
            return TorchLoader()
    return Replayed()


def _own_generators(loader: Any) -> list[torch.Generator]:
    owners = [loader, *samplers_of(loader)]
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found
