"""What a snapshot takes and a restore fills: the training state of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from megatron_ft.core.shard import LogicalPlace


@runtime_checkable
class TrainingState(Protocol):
    """The complete training state of one rank, as names and live tensors.

    At an iteration boundary the manager calls ``tensors``, ``boundary_tensors`` and
    ``objects``; on restore it fills the tensors in place and then calls ``load``.
    Names are unique over both kinds and the same in every life of the job.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors that change only inside the fence: copied lazily until then."""

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors that forward or backward may change: secured at the boundary."""

    def objects(self) -> dict[str, Any]:
        """Small values that core.objects.encode takes, as of now: counters, schedules,
        generators.
        """

    def replicas(self) -> Mapping[str, Any]:
        """Names of tensors that are equal on all ranks of a group, with that process group."""

    def load(self, objects: dict[str, Any]) -> None:
        """Take what ``objects`` gave, after the tensors were filled."""


@runtime_checkable
class Refreshable(Protocol):
    """A state that enumerates its tensors in one pass."""

    def refresh(self) -> None:
        """Called once at each boundary, before the other methods."""


@runtime_checkable
class AdoptsTensors(Protocol):
    """A state whose tensors may not all exist yet in a fresh process."""

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take stored tensors that have no live counterpart; called before ``load``.

        They are copies that belong to the callee, on the CPU unless they were
        exchanged between devices.
        """

    def replica_group(self, name: str) -> Any:
        """The process group of a replicated tensor that may not exist yet, or None."""


@runtime_checkable
class HasLogicalMap(Protocol):
    """A state that knows the place of its tensors in the unsharded model."""

    def logical_map(self) -> Mapping[str, LogicalPlace]:
        """Places by tensor name; a tensor may be left out."""


@runtime_checkable
class HasCheckpointForm(Protocol):
    """A state that says once what its framework would write to disk of it."""

    def checkpoint_form(self) -> bytes:
        """An opaque description, the same in every life; kept beside each snapshot."""


def live_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Both kinds together, as of now."""
    if isinstance(state, Refreshable):
        state.refresh()
    return {**state.tensors(), **state.boundary_tensors()}
