"""The training state of one rank: what a snapshot takes and a restore fills.

``TrainingState`` is the protocol, with optional parts.  Beside it are ``RngState``, to be put into
a state mapping, and copies and comparisons of the values that snapshots hold.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import LogicalPlace


def host_copy(value: Any) -> Any:
    """The value with every tensor in it copied to the host, detached from the live one.

    Containers are copied, whatever their class; other objects are not.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, inner in value.items():
            made[key] = host_copy(inner)  # not update(): a Counter's would add
        return made
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(host_copy(inner) for inner in value)
    if isinstance(value, list | tuple):
        return type(value)(host_copy(inner) for inner in value)
    return value


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if both hold the same bytes; a NaN equals itself, -0.0 is not 0.0."""
    left, right = (t.detach().contiguous().view(-1) for t in (left, right))
    if not left.numel():
        return left.shape == right.shape and left.dtype == right.dtype
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


class RngState:
    """Generators of Python, numpy, torch on the CPU, and torch on the current accelerator.

    Follows the Stateful protocol: ``SnapshotManager.save(i, {"rng": RngState(), ...})``
    captures them at the iteration boundary and a load sets them.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them; an accelerator's state is left out where there is no accelerator."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"].cpu())


def drawn() -> tuple[Any, ...]:
    _, keys, position, *rest = np.random.get_state()
    return (
        random.getstate(),
        (np.asarray(keys).tobytes(), position, *rest),
        torch.get_rng_state().numpy().tobytes(),
    )


class Lost(NamedTuple):
    """Descriptions of objects that a restart loses, and what a user does about that."""

    objects: list[str]
    advice: str


@runtime_checkable
class TrainingState(Protocol):
    """The complete training state of one rank, as names and live tensors.

    At an iteration boundary the manager calls ``tensors``, ``boundary_tensors`` and
    ``objects``; on restore it fills the tensors in place and then calls ``load``.
    Names are unique over both kinds and the same in every incarnation of the job.
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

    def replaces(self, name: str) -> bool:
        """True if ``load`` puts a stored tensor in the place of a live one of another form."""

    def replica_group(self, name: str) -> Any:
        """The process group of a replicated tensor that may not exist yet, or None."""


@runtime_checkable
class TrainsInPlace(Protocol):
    """A state of objects that train in memory of their own, whatever names it has here."""

    def require_ready(self) -> None:
        """ConfigError, before training, that names what cannot be captured or filled."""

    def left_out(self) -> Collection[str]:
        """Names of tensors that are not captured because the program asked for it."""

    def overwritten(self) -> Collection[str]:
        """Names of tensors that do not hold what was filled any more, behind ``load``."""


@runtime_checkable
class KnowsMemory(Protocol):
    """A state that knows which memory trains, and compares it with what is captured and filled."""

    def require_covered(self) -> None:
        """ConfigError that names a tensor that trains and is neither captured nor derived."""

    def derived(self) -> Mapping[str, torch.Tensor]:
        """Tensors that train, are not captured, and are made of captured ones in ``load``."""

    def restart_losses(self) -> Lost:
        """Objects of the process with training state that is not captured."""


@runtime_checkable
class RemembersMore(Protocol):
    """A state that ``refresh`` does not read whole: what belongs to what is remembered."""

    def rescan(self) -> None:
        """Read all of it anew; called where the layout is planned anew.

        ConfigError for what cannot be captured: no snapshot is taken then.
        """


@runtime_checkable
class ComparesMore(Protocol):
    """A state that knows more live tensors that are equal on all ranks of a group.

    They are compared as those of ``replicas``, but need not be captured, or are captured whole.
    """

    def compared(self) -> Mapping[str, tuple[torch.Tensor, Any]]:
        """Each of them by name, with that process group; asked by the copy thread."""


@runtime_checkable
class WrapsTensors(Protocol):
    """A state of which some live tensors are the insides of others, as the shards of DTensors."""

    def wrapped(self) -> Mapping[str, torch.Tensor]:
        """The outer ones by name, as of the last enumeration."""


@runtime_checkable
class KnowsOptimizers(Protocol):
    """A state that knows which optimizer changes a tensor."""

    def optimizer_of(self, names: Sequence[str]) -> str:
        """Name and class of one that owns such a tensor, for messages; '' if none is known."""


@runtime_checkable
class HasLogicalMap(Protocol):
    """A state that knows the place of its tensors in the unsharded model."""

    def logical_map(self) -> Mapping[str, LogicalPlace]:
        """Places by tensor name; a tensor may be left out."""


@runtime_checkable
class HasCheckpointForm(Protocol):
    """A state that says once what its framework would write to disk of it."""

    def checkpoint_form(self) -> bytes:
        """An opaque description, the same in every incarnation; kept with each snapshot."""


def form_of(state: TrainingState) -> bytes:
    return state.checkpoint_form() if isinstance(state, HasCheckpointForm) else b""


@runtime_checkable
class Reshapes(Protocol):
    """A state that can take a snapshot of another layout: its tensors by their logical places.

    A tensor without a place is the same on every rank.
    """

    def expect_reshape(self) -> None:
        """Called once before the layout is planned: create what a fresh process lacks.

        Raises LayoutMismatchError if tensors cannot come from another layout.
        """

    def reshape_objects(
        self, shard_id: str, origins: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        """The argument of ``load`` on the rank ``shard_id``, made of objects of old shards.

        ``origins`` are old shard ids with objects: the nearest shard first, and at least the first
        of the old job.  Raises LayoutMismatchError if they have no meaning here.
        """


def require_reshapes(state: TrainingState) -> Reshapes:
    """The state, if it can take a snapshot of another layout; LayoutMismatchError if not."""
    if not isinstance(state, Reshapes):
        raise LayoutMismatchError(
            f"the snapshot is of another layout, and {type(state).__name__} cannot be reshaped: "
            "start with the old flags and number of ranks"
        )
    return state


def live_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    if isinstance(state, Refreshable):
        state.refresh()
    return {**state.tensors(), **state.boundary_tensors()}
