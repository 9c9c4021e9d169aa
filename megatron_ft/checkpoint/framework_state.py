"""The state of a rank that a framework trains, as far as Megatron and DeepSpeed have it alike.

Low-precision weights follow from captured masters.  The framework's own description of the rank
says where its tensors lie in the unsharded model, and what it would save.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from megatron_ft.checkpoint.export import CheckpointForm
from megatron_ft.core.errors import LayoutMismatchError, explain
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.trainer.coverage import Named, held_by_optimizer
from megatron_ft.trainer.flat_coverage import derived_of, in_groups
from megatron_ft.trainer.master_tensors import Weight
from megatron_ft.trainer.state import Lost, live_tensors, same_bits
from megatron_ft.trainer.uncaptured import uncaptured

logger = logging.getLogger(__name__)


class Description(NamedTuple):
    """The logical map and the checkpoint form of one rank.

    ``problem`` is the reason why there is no export, '' if there is one.
    """

    places: Mapping[str, LogicalPlace]
    form: bytes
    problem: str


def described(
    framework: str, release: str, describe: Callable[[dict[str, LogicalPlace]], bytes]
) -> Description:
    """Call ``describe``, which fills the logical map and returns the state of the form.

    It fails where the framework saves what no snapshot holds.  Snapshots work without a form, so
    that is a warning.  Collective if ``describe`` is.
    """
    places, state, problem = dict[str, LogicalPlace](), b"", ""
    try:
        state = describe(places)
    except Exception as error:
        problem = explain(error)
        logger.warning("snapshots of this run cannot be exported: %s", problem)
    rank = torch.distributed.get_rank()
    # A checkout or a build from source appends its commit to the version.
    form = CheckpointForm(
        framework=framework,
        release=release.partition("+")[0],
        rank=rank,
        state=state,
        problem=problem,
    )
    return Description(places, form.to_bytes(), problem)


class FrameworkState(ABC):
    """Implements ``trainer.state.TrainingState`` as far as the framework does not matter.

    Low-precision weights that are not their masters rounded are captured too: their names are in
    ``_copied``.
    """

    version: ClassVar[int]
    """That of ``objects``."""
    advice: ClassVar[str]
    """Advice on objects that a restart loses."""
    readers: ClassVar[Sequence[str]] = ("*DataLoaderIter",)
    """Classes of which the framework keeps the position, or warns by itself."""

    def __init__(self) -> None:
        self._copied: set[str] = set()

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def boundary_tensors(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def objects(self) -> dict[str, Any]: ...

    @abstractmethod
    def load(self, objects: dict[str, Any]) -> None: ...

    @abstractmethod
    def _weights(self) -> Iterable[Weight]:
        """The low-precision weights of this rank that follow from masters."""

    @abstractmethod
    def _publish_targets(self) -> Iterable[torch.Tensor]:
        """Memory that ``load`` fills from masters, of this rank or of others."""

    @abstractmethod
    def _replicated(self) -> Iterator[tuple[Iterable[str], Any]]:
        """Names of optimizer tensors, with the group whose ranks keep them equal."""

    @abstractmethod
    def _inner_optimizers(self) -> dict[str, Any]: ...

    @abstractmethod
    def _members(self) -> Iterable[Named]:
        """All parameters and buffers of the model."""

    @abstractmethod
    def _known(self) -> dict[str, Any]:
        """Objects whose state is captured, beside the inner optimizers."""

    @abstractmethod
    def _described(self) -> Description: ...

    def _find_copied(self, kind: str) -> None:
        """Compare the weights with their masters, and warn of those that differ."""
        self._copied = {weight.name for weight in self._weights() if not _follows(weight)}
        if self._copied:
            logger.warning(
                "%d %s are not their fp32 masters rounded, so snapshots of this job hold them too, "
                "at 2 bytes a parameter; %s is one",
                *(len(self._copied), kind, min(self._copied)),
            )

    def _copies(self) -> list[Weight]:
        """The weights that are captured, in the memory that they have now."""
        names = self._copied
        return [weight for weight in self._weights() if weight.name in names] if names else []

    def _held(self) -> Iterator[Named]:
        yield from self._members()
        for name, inner in self._inner_optimizers().items():
            yield from held_by_optimizer(name, inner)

    def require_covered(self) -> None:
        self.derived()

    def derived(self) -> dict[str, torch.Tensor]:
        captured = [*self.tensors().values(), *self.boundary_tensors().values()]
        for inner in self._inner_optimizers().values():
            captured += in_groups(inner)
        return derived_of(self._held(), captured, self._publish_targets())

    def restart_losses(self) -> Lost:
        known = {**self._known(), **self._inner_optimizers()}
        found = uncaptured(known, [tensor for _, tensor in self._held()], self.readers)
        return Lost(found, self.advice)

    def replicas(self) -> dict[str, Any]:
        found = {weight.name: weight.replicas for weight in self._copies()}
        for names, group in self._replicated():
            found |= dict.fromkeys(names, group)
        return {name: group for name, group in found.items() if group is not None}

    def replica_group(self, name: str) -> Any:
        return {weight.name: weight.replicas for weight in self._weights()}.get(name)

    def replaces(self, name: str) -> bool:
        """False: the framework has views of all of them."""
        return False

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take weights that the snapshot holds because they did not follow from masters."""
        every = {weight.name: weight.tensor for weight in self._weights()}
        for name, stored in tensors.items():
            weight = every.get(name)
            if weight is None or weight.shape != stored.shape:
                raise LayoutMismatchError(
                    f"{name} is only in the snapshot; build the same model and optimizer as in "
                    "the run that saved it"
                )
            weight.copy_(stored)
            self._copied.add(name)

    def logical_map(self) -> Mapping[str, LogicalPlace]:
        return self._described().places

    def checkpoint_form(self) -> bytes:
        return self._described().form

    def expect_reshape(self) -> None:
        """LayoutMismatchError naming captured tensors that cannot come from another layout."""
        unknown = sorted(live_tensors(self).keys() - self._described().places.keys())
        if unknown:
            reason = self._described().problem or "each rank has its own"
            raise LayoutMismatchError(
                f"{len(unknown)} tensors have no known place in the unsharded model, {unknown[0]} "
                f"first ({reason}), so the snapshot cannot be taken into another layout: start "
                "with the old settings and number of ranks"
            )

    def _require_version(self, objects: Mapping[str, Any]) -> None:
        if objects.get("version") != self.version:
            raise LayoutMismatchError(
                f"the snapshot's objects have version {objects.get('version')}, this release "
                f"reads {self.version}; restore with the release that took it"
            )


def _follows(weight: Weight) -> bool:
    """True if a weight is its master, rounded."""
    rounded = weight.master.to(weight.tensor.device, weight.tensor.dtype)
    if same_bits(weight.tensor, rounded):
        return True
    # Rounding may change the bits of a NaN, such as padding that nobody has set.
    unset = weight.tensor.isnan() & rounded.isnan()
    return same_bits(weight.tensor.masked_fill(unset, 0), rounded.masked_fill(unset, 0))
