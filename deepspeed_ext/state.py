"""The complete training state of one DeepSpeed rank, as the snapshot manager sees it.

Captured are the tensors that the optimizer owns on this rank (fp32 masters, moments, steps),
parameters that no optimizer owns, buffers, and small objects.  Low-precision weights are not,
as long as they are the masters, rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_ext import client_state, reshape, state_parts
from deepspeed_ext.checkpoint_form import RankDescription
from deepspeed_ext.optimizers import view_of
from deepspeed_ext.optimizers.unsharded import replica_group
from deepspeed_ext.optimizers.view import (
    OwnedMaster,
    Weight,
    group_scalars,
    load_group_scalars,
    names_of,
    share_states,
    shared_states,
    tensors_of,
)
from deepspeed_ext.state_parts import ModelTensors
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.trainer.coverage import Named, held_by_optimizer
from megatron_ft.trainer.flat_coverage import derived_of, in_groups, members
from megatron_ft.trainer.master_tensors import create_state
from megatron_ft.trainer.module_tree import extra_states, load_extra_states
from megatron_ft.trainer.state import Lost, host_copy, live_tensors, same_bits
from megatron_ft.trainer.uncaptured import uncaptured

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)

OBJECTS_VERSION = 1
OWN = frozenset("version training groups numbers optimizer modules shared flags".split())
"""Names in ``objects`` that parts must not have."""

_BESIDE = (
    "make them submodules of the engine's model, or let deepspeed_ext.set_client_state give their "
    "state; ignore this for what is loaded anew at each start and never changes"
)
_READERS = ("*DataLoaderIter",)
"""Classes whose state has a warning of its own."""

RANDOM = "random"
"""The part that is loaded last, because loading the others may draw."""


class EngineState:
    """Implements ``trainer.state.TrainingState`` for an engine that is complete.

    Tensors are those of the last ``refresh``.  Making one creates moments that do not exist
    before the first step, and finds out which weights do not follow from masters: those are
    captured too.  ``parts`` add to ``objects``, under their names; :data:`RANDOM` is loaded
    last.  Raises ConfigError for an optimizer that is not known or keeps something unknown.
    """

    def __init__(self, engine: Any, parts: Mapping[str, Stateful] | None = None) -> None:
        self._engine = engine
        self._parts = dict(parts or {})
        assert not OWN & self._parts.keys(), f"parts must not be called {sorted(OWN)}"
        self._view = view_of(engine)
        self._model = ModelTensors(engine, self._view.owned)
        self._masters: list[OwnedMaster] = []
        self._kept = tensors_of([])
        self._tensors: dict[str, torch.Tensor] | None = None
        self._unlike_masters: set[str] = set()
        self._description: RankDescription | None = None
        self._shared: dict[str, str] = {}
        self.rescan()

    def rescan(self) -> None:
        """Read the optimizer anew: DeepSpeed has loaded a checkpoint of its own."""
        self._read_masters()
        self._model.refresh()
        self._unlike_masters = {w.name for w in self._view.weights() if not _follows(w)}
        if self._unlike_masters:
            logger.warning(
                "%d groups of low-precision weights are not their fp32 masters rounded, so "
                "snapshots of this job hold them too, at 2 bytes a parameter; %s is one",
                len(self._unlike_masters),
                min(self._unlike_masters),
            )
        self.refresh()

    def _read_masters(self) -> None:
        self._description = None
        self._masters = list(self._view.masters())
        for master in self._masters:
            create_state(master.inner, master.group, master.parameter)
        self._kept = tensors_of(self._masters)
        self._shared = shared_states(self._masters)

    def refresh(self) -> None:
        """Read the model and the state of its optimizer as they are now."""
        self._model.refresh()
        weights = {weight.name: weight.tensor for weight in self._captured_weights()}
        self._tensors = {**self._model.frozen, **weights, **self._kept.tensors()}

    def require_covered(self) -> None:
        """ConfigError that names a tensor that trains and is neither captured nor derived."""
        self.derived()

    def derived(self) -> dict[str, torch.Tensor]:
        """Low-precision weights that ``load`` makes of masters, where a parameter has memory."""
        captured = [*self._found().values(), *self._model.buffers.values()]
        captured += in_groups(self._view.inner)
        return derived_of(self._held(), captured, self._view.derived())

    def _held(self) -> Iterator[Named]:
        """All that the engine's modules and its optimizer hold; of ZeRO-3 the partitions too."""
        for name, tensor in members(lambda: [self._engine.module]):
            yield f"model/{name}", tensor
            if hasattr(tensor, "ds_tensor"):
                yield f"model/{name} (its partition)", tensor.ds_tensor
        yield from held_by_optimizer("optimizer", self._view.inner)

    def beside(self) -> Lost:
        """Objects with training state in this process that the engine does not know."""
        wrapper = self._engine.optimizer
        known = {"inner": self._view.inner, "wrapper": wrapper, "parts": self._parts}
        known["client"] = client_state.provider_of(self._engine)
        known |= {name: getattr(self._engine, name, None) for name in state_parts.STATEFUL}
        found = uncaptured(known, [tensor for _, tensor in self._held()], _READERS)
        return Lost(found, _BESIDE)

    def forget_tensors(self) -> None:
        """Drop the tensors that ``refresh`` found: DeepSpeed is about to free their memory."""
        self._model.forget()
        self._tensors = None

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer before whose steps captures have to be over."""
        return self._view.inner

    def before_training(self) -> None:
        """See OptimizerView."""
        self._view.before_training()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments, steps, frozen parameters: changed by the optimizer alone."""
        return self._found()

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer: forward may change it."""
        self._found()
        return self._model.buffers

    def _found(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self.refresh()
        assert self._tensors is not None
        return self._tensors

    def replicas(self) -> dict[str, Any]:
        """Tensors of optimizers that several ranks keep equal, with the group of these ranks."""
        found = {weight.name: weight.replicas for weight in self._captured_weights()}
        for master in self._masters:
            found |= dict.fromkeys(names_of(master), master.replicas)
        return {name: group for name, group in found.items() if group is not None}

    def compared(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """The model's parameters, unless ZeRO-3 has cut them: then no rank has what another has."""
        every = self._model.tree.parameters.items()
        return {
            f"model/{name}": (parameter, group)
            for name, parameter in every
            if not hasattr(parameter, "ds_tensor")
            if (group := replica_group(self._engine, parameter)) is not None
        }

    def replica_group(self, name: str) -> Any:
        """The group of a tensor that the snapshot holds and this state does not yet."""
        groups = {weight.name: weight.replicas for weight in self._view.weights()}
        return groups.get(name) or self._view.replica_group(name)

    def replaces(self, name: str) -> bool:
        """False: DeepSpeed has views of all of them."""
        return False

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take weights that the snapshot holds because they did not follow from masters."""
        every = {weight.name: weight for weight in self._view.weights()}
        for name, stored in tensors.items():
            if self._adopt(name, stored):
                continue
            weight = every.get(name)
            if weight is None or weight.tensor.shape != stored.shape:
                raise LayoutMismatchError(
                    f"{name} is only in the snapshot; build the same model and optimizer as in "
                    "the run that saved it"
                )
            weight.tensor.copy_(stored)
            self._unlike_masters.add(name)
        self._read_masters()

    def _adopt(self, name: str, stored: torch.Tensor) -> bool:
        """Take what was frozen in the snapshot and is trained here, or the other way round."""
        frozen = self._model.find_frozen(name)
        if frozen is None:
            return self._view.adopt(name, stored)
        if frozen.shape != stored.shape or frozen.dtype != stored.dtype:
            return False
        frozen.detach().copy_(stored)
        return True

    def _captured_weights(self) -> list[Weight]:
        """Those that are captured beside their masters, in the memory that they have now."""
        # Views of weights are made for each, so nobody is asked in the ordinary case of none.
        names = self._unlike_masters
        return [w for w in self._view.weights() if w.name in names] if names else []

    def logical_map(self) -> dict[str, LogicalPlace]:
        """Places in the unsharded model, of all tensors of which they are known."""
        return self._described().places

    def checkpoint_form(self) -> bytes:
        """The form of the checkpoint that DeepSpeed itself would save of this rank."""
        return self._described().form

    def _described(self) -> RankDescription:
        if self._description is None:
            self._description = RankDescription(self._engine, self._view, live_tensors(self))
        return self._description

    def expect_reshape(self) -> None:
        """LayoutMismatchError naming captured tensors that cannot come from another layout."""
        unknown = sorted(live_tensors(self).keys() - self.logical_map().keys())
        if unknown:
            raise LayoutMismatchError(
                f"{len(unknown)} tensors have no known place in the unsharded model, {unknown[0]} "
                "first, so the snapshot cannot be taken into another layout: start with the old "
                "JSON and number of ranks"
            )

    def reshape_objects(
        self, shard_id: str, origins: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        """The objects of the nearest old rank; its random states only if it is this one."""
        made = reshape.reshaped(self.objects(), origins)
        if isinstance(client := self._parts.get(client_state.NAME), client_state.ClientState):
            if problem := client.objection(made):
                raise LayoutMismatchError(problem)
        if shard_id not in dict(origins) and made.pop(RANDOM, None) is not None:
            logger.warning("%s was not in the snapshot: random states stay as seeded", shard_id)
        return made

    def objects(self) -> dict[str, Any]:
        """Small values as of now; no tensor in them shares memory with a live one."""
        self._found()
        own = {
            "version": OBJECTS_VERSION,
            "training": state_parts.capture(self._engine),
            "groups": [group_scalars(self._view.inner)],
            "numbers": self._numbers(),
            "shared": dict(self._shared),
            "optimizer": host_copy(self._view.scalars()),
            "modules": host_copy(extra_states(self._model.tree.keeping)),
            "flags": self._model.flags(self._view.inner.state),
        }
        return own | {name: part.state_dict() for name, part in self._parts.items()}

    def _numbers(self) -> dict[str, dict[str, Any]]:
        """Numbers by master, in order; {} if no master has any, as with torch's optimizers."""
        kept = self._kept.numbers()
        return {master.name: kept.get(master.name, {}) for master in self._masters} if kept else {}

    def load(self, objects: dict[str, Any]) -> None:
        """Set everything that is not a captured tensor, after those were filled in place.

        Collective over the data-parallel group, because ranks give each other weights.
        """
        if objects.get("version") != OBJECTS_VERSION:
            raise LayoutMismatchError(
                f"the snapshot's objects have version {objects.get('version')}, this release "
                f"reads {OBJECTS_VERSION}; restore with the release that took it"
            )
        # Before all that goes by what is trained; snapshots of earlier releases have none.
        if self._model.load_flags(objects.get("flags", {}), self._view.inner.state):
            self._read_masters()
        share_states(self._masters, objects["shared"])
        self._shared = dict(objects["shared"])
        with torch.no_grad():
            kept = {weight.name: weight.tensor.clone() for weight in self._captured_weights()}
            self._view.publish(kept)
        state_parts.restore(self._engine, objects["training"])
        self._load_optimizer(objects)
        load_extra_states(self._engine.module.named_modules(), objects["modules"])
        for name in sorted(self._parts, key=lambda name: name == RANDOM):
            if name in objects:
                self._parts[name].load_state_dict(objects[name])

    def _load_optimizer(self, objects: dict[str, Any]) -> None:
        # After the schedules: what the groups held at the snapshot is what the next step uses.
        (scalars,) = objects["groups"]
        load_group_scalars(self._view.inner, scalars)
        for master in self._masters:
            numbers = objects["numbers"].get(master.name, {})
            master.inner.state[master.parameter].update(numbers)
        self._view.load_scalars(objects["optimizer"])


def _follows(weight: Weight) -> bool:
    rounded = weight.master.to(weight.tensor.device, weight.tensor.dtype)
    if same_bits(weight.tensor, rounded):
        return True
    # Rounding may change the bits of what is no number, such as padding that nobody has set.
    unset = weight.tensor.isnan() & rounded.isnan()
    return same_bits(weight.tensor.masked_fill(unset, 0), rounded.masked_fill(unset, 0))
