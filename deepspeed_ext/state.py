"""The complete training state of one DeepSpeed rank, as the snapshot manager sees it.

Captured are the tensors that the optimizer owns on this rank (fp32 masters, moments, steps),
parameters that no optimizer owns, buffers, and small objects.  Low-precision weights are not,
as long as they are the masters, rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_ext import client_state, reshape, state_parts
from deepspeed_ext.checkpoint_form import describe_rank
from deepspeed_ext.optimizers import view_of
from deepspeed_ext.optimizers.unsharded import replica_group
from deepspeed_ext.optimizers.view import (
    OwnedMaster,
    group_scalars,
    load_group_scalars,
    names_of,
    share_states,
    shared_states,
    tensors_of,
)
from deepspeed_ext.state_parts import ModelTensors
from megatron_ft.checkpoint.framework_state import Description, FrameworkState
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer.coverage import Named
from megatron_ft.trainer.flat_coverage import members
from megatron_ft.trainer.master_tensors import Weight, create_state
from megatron_ft.trainer.module_tree import extra_states, load_extra_states
from megatron_ft.trainer.state import host_copy, live_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)

OWN = frozenset("version training groups numbers optimizer modules shared flags".split())
"""Names in ``objects`` that parts must not have."""

RANDOM = "random"
"""The part that is loaded last, because loading the others may draw."""


class EngineState(FrameworkState):
    """The FrameworkState of an engine that is complete.

    Tensors are those of the last ``refresh``.  Making one creates moments that do not exist
    before the first step, and finds out which weights do not follow from masters: those are
    captured too.  ``parts`` add to ``objects``, under their names; :data:`RANDOM` is loaded
    last.  Raises ConfigError for an optimizer that is not known or keeps something unknown.
    """

    version = 1
    advice = (
        "make them submodules of the engine's model, or let deepspeed_ext.set_client_state give "
        "their state; ignore this for what is loaded anew at each start and never changes"
    )

    def __init__(self, engine: Any, parts: Mapping[str, Stateful] | None = None) -> None:
        super().__init__()
        self._engine = engine
        self._parts = dict(parts or {})
        assert not OWN & self._parts.keys(), f"parts must not be called {sorted(OWN)}"
        self._view = view_of(engine)
        self._model = ModelTensors(engine, self._view.owned)
        self._masters: list[OwnedMaster] = []
        self._kept = tensors_of([])
        self._tensors: dict[str, torch.Tensor] | None = None
        self._description: Description | None = None
        self._shared: dict[str, str] = {}
        self.rescan()

    def rescan(self) -> None:
        """Read the optimizer anew: DeepSpeed has loaded a checkpoint of its own."""
        self._read_masters()
        self._model.refresh()
        self._find_copied("groups of low-precision weights")
        self.refresh()

    def _read_masters(self) -> None:
        self._description = None
        self._masters = list(self._view.masters())
        for master in self._masters:
            create_state(master.inner, master.group, master.parameter)
        self._kept = tensors_of(self._masters)
        self._shared = shared_states(self._masters)

    def refresh(self) -> None:
        self._model.refresh()
        weights = {weight.name: weight.tensor for weight in self._copies()}
        self._tensors = {**self._model.frozen, **weights, **self._kept.tensors()}

    def _weights(self) -> Sequence[Weight]:
        return self._view.weights()

    def _publish_targets(self) -> Iterable[torch.Tensor]:
        return self._view.derived()

    def _replicated(self) -> Iterator[tuple[Iterable[str], Any]]:
        return ((names_of(master), master.replicas) for master in self._masters)

    def _inner_optimizers(self) -> dict[str, Any]:
        return {"optimizer": self._view.inner}

    def _members(self) -> Iterator[Named]:
        for name, tensor in members(lambda: [self._engine.module]):
            yield f"model/{name}", tensor
            if hasattr(tensor, "ds_tensor"):
                yield f"model/{name} (its partition)", tensor.ds_tensor

    def _known(self) -> dict[str, Any]:
        client = client_state.provider_of(self._engine)
        known = {"wrapper": self._engine.optimizer, "parts": self._parts, "client": client}
        return known | {name: getattr(self._engine, name, None) for name in state_parts.STATEFUL}

    def _described(self) -> Description:
        if self._description is None:
            self._description = describe_rank(self._engine, self._view, live_tensors(self))
        return self._description

    def forget_tensors(self) -> None:
        """Drop the tensors that ``refresh`` found: DeepSpeed is about to free their memory."""
        self._model.forget()
        self._tensors = None

    @property
    def inner_optimizer(self) -> Any:
        return self._view.inner

    def before_training(self) -> None:
        self._view.before_training()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._found()

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        self._found()
        return self._model.buffers

    def _found(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self.refresh()
        assert self._tensors is not None
        return self._tensors

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
        return super().replica_group(name) or self._view.replica_group(name)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Also the state of a parameter that is trained here, or in the snapshot, alone."""
        super().adopt({name: one for name, one in tensors.items() if not self._adopt(name, one)})
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
        self._found()
        own = {
            "version": self.version,
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
        self._require_version(objects)
        # Before all that goes by what is trained; snapshots of earlier releases have none.
        if self._model.load_flags(objects.get("flags", {}), self._view.inner.state):
            self._read_masters()
        share_states(self._masters, objects["shared"])
        self._shared = dict(objects["shared"])
        with torch.no_grad():
            kept = {weight.name: weight.tensor.clone() for weight in self._copies()}
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
