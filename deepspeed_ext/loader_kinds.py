"""How the rest of an interrupted pass is made from a fresh loader, for each kind of loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from deepspeed_ext.curriculum import CurriculumSampler
from deepspeed_ext.epoch_numbers import samplers_of
from deepspeed_ext.skipping import resume_deepspeed_loader, resume_torch_loader

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
