"""The complete training state of one Megatron rank, as the snapshot manager sees it.

Captured are the tensors that the optimizer owns (fp32 masters, moments, steps), frozen
parameters, buffers, and small objects.  Low-precision weights are not as long as they are
the masters, rounded; with overlapped parameter gathers they are stale at the end of an
iteration anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from megatron_ft.checkpoint.native import wish_of
from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.megatron import optimizer as optimizers
from megatron_ft.megatron import reshaped_objects, state_parts
from megatron_ft.megatron.logical_map import Description, RankTensors
from megatron_ft.megatron.optimizer import MAIN, WEIGHT
from megatron_ft.megatron.state_parts import (
    capture_random_states,
    module_tree,
    replica_group,
    restore_random_states,
    weight_group,
)
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.coverage import Named, held_by_optimizer
from megatron_ft.trainer.flat_coverage import derived_of, in_groups
from megatron_ft.trainer.master_tensors import MasterTensors, Owned, as_captured
from megatron_ft.trainer.module_tree import extra_states, load_extra_states
from megatron_ft.trainer.start_choice import WISH
from megatron_ft.trainer.state import Lost, host_copy, live_tensors
from megatron_ft.trainer.uncaptured import uncaptured

logger = logging.getLogger(__name__)

OBJECTS_VERSION = 3
_TRAINED = attrgetter("requires_grad")
_BESIDE = (
    "make them submodules of the model that model_provider returns; ignore this for what is loaded "
    "anew at each start and never changes"
)
_OWN_POSITION = ("*DataLoaderIter",)
"""Classes whose position is that of Megatron's counters, or of an external loader."""
_MAIN = MAIN.removeprefix(".")


class MegatronState:
    """Implements ``trainer.state.TrainingState`` for a model, its optimizer and its schedule.

    Making one creates the optimizer's state where it is still empty, and finds out which
    weights do not follow from masters: those are captured too.  ``at`` must be called
    before ``objects``: iteration and FLOPs are Megatron's local variables, not on its
    arguments.  Raises ConfigError for an optimizer that keeps something unknown.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, args: Any) -> None:
        self._model = list(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._args = args
        self._sizes = reshaped_objects.parallel_sizes(args)
        self._iteration = 0
        self._operations: float = 0
        self._data_iterator: Any = None
        self._began = False
        self._loaded: dict[str, Any] | None = None
        optimizers.materialise(optimizer)
        self._tree = module_tree(self._model)
        self._tree.refresh()
        self._names = {id(tensor): name for name, tensor in self._tree.parameters.items()}
        self._masters = optimizers.masters(optimizer, self._names)
        owned = (Owned(master.name, master.inner, master.tensor) for master in self._masters)
        self._owned = MasterTensors(owned, ".", _MAIN)
        self._weights = optimizers.independent_weights(optimizer, self._names)
        if self._weights:
            logger.warning(
                "%d low-precision weights are not their fp32 masters rounded, so snapshots of "
                "this job hold them too, at 2 bytes a parameter; %s is one",
                len(self._weights),
                min(self._weights),
            )
        every = optimizers.master_names(optimizer, self._names)
        self._trained = {key for key, name in self._names.items() if name in every}
        self._description = Description(
            args, self._model, optimizer, scheduler, self._rank_tensors(every)
        )

    def _rank_tensors(self, master_names: dict[str, str]) -> RankTensors:
        copies = {f"{name}{WEIGHT}" for name in self._weights}
        captured = {**self.tensors(), **self.boundary_tensors()}
        return RankTensors(
            captured={name: tensor for name, tensor in captured.items() if name not in copies},
            model={**self._tree.parameters, **self._tree.buffers},
            masters=tuple(self._masters),
            master_names=master_names,
        )

    def at(self, iteration: int, floating_point_operations: float, data_iterator: Any) -> None:
        """Say where training stands: what ``objects`` will report until the next call."""
        self._iteration = iteration
        self._operations = floating_point_operations
        self._data_iterator = data_iterator

    def refresh(self) -> None:
        """Look at the model's modules as they are now."""
        self._tree.refresh()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments, steps, and parameters that no rank's optimizer has."""
        every = self._tree.parameters.items()
        frozen = {name: as_captured(p) for name, p in every if id(p) not in self._trained}
        copies = {f"{name}{WEIGHT}": weight for name, weight in self._weights.items()}
        return {**frozen, **copies, **self._owned.tensors()}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer: forward may change it (routing statistics, expert biases)."""
        return {name: as_captured(buffer) for name, buffer in self._tree.buffers.items()}

    def require_covered(self) -> None:
        """ConfigError that names a tensor that trains and is neither captured nor derived."""
        self.derived()

    def derived(self) -> dict[str, torch.Tensor]:
        """Weights that ``load`` makes of masters, this rank's or those of others."""
        captured = [*self.tensors().values(), *self.boundary_tensors().values()]
        for part in optimizers.optimizer_parts(self._optimizer):
            captured += in_groups(part.optimizer)
        weights = (p for p in self._tree.parameters.values() if id(p) in self._trained)
        return derived_of(self._held(), captured, optimizers.derived(self._optimizer, weights))

    def _held(self) -> Iterator[Named]:
        """All that the model's modules and its optimizers hold."""
        yield from state_parts.members_of(self._model)
        for number, part in enumerate(optimizers.optimizer_parts(self._optimizer)):
            yield from held_by_optimizer(f"optimizer{number}", part.optimizer)

    def beside(self) -> Lost:
        """Objects with training state in this process that Megatron does not know."""
        parts = optimizers.optimizer_parts(self._optimizer)
        known = {f"optimizer{number}": part.optimizer for number, part in enumerate(parts)}
        known |= {"optimizer": self._optimizer, "scheduler": self._scheduler, "parts": parts}
        found = uncaptured(known, [tensor for _, tensor in self._held()], _OWN_POSITION)
        return Lost(found, _BESIDE)

    def replicas(self) -> dict[str, Any]:
        """Tensors of optimizers that several ranks keep equal, with the group of these ranks."""
        groups = {
            master.name: group
            for master in self._masters
            if (group := replica_group(master, self._args)) is not None
        }
        found = {f"{name}{WEIGHT}": groups[name] for name in self._weights if name in groups}
        for master in self._masters:
            if master.name in groups:
                kept = master_tensors.state_tensors(master.inner, master.tensor)
                names = (_MAIN, *kept)
                found |= {f"{master.name}.{name}": groups[master.name] for name in names}
        return found

    def compared(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """The model's weights, as its data-parallel ranks have them when an iteration has ended.

        None where they are gathered while the next one runs, or sharded.
        """
        if not state_parts.weights_are_whole(self._args):
            return {}
        every = self._tree.parameters.items()
        return {name: (weight, weight_group(weight)) for name, weight in every}

    def replaces(self, name: str) -> bool:
        """False: Megatron has views of all of them."""
        return False

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take weights that the snapshot holds because they did not follow from masters."""
        every = optimizers.low_precision_weights(self._optimizer, self._names)
        for name, stored in tensors.items():
            weight = every.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
            if weight is None or weight.shape != stored.shape:
                raise LayoutMismatchError(
                    f"{name} is only in the snapshot; build the same model and optimizer as in "
                    "the run that saved it"
                )
            weight.copy_(stored)
            self._weights[name.removesuffix(WEIGHT)] = weight

    def replica_group(self, name: str) -> Any:
        """The group of a weight that the snapshot holds and this state does not yet."""
        groups = {master.name: replica_group(master, self._args) for master in self._masters}
        return groups.get(name.removesuffix(WEIGHT))

    def logical_map(self) -> dict[str, LogicalPlace]:
        """Places in the unsharded model, of all tensors that Megatron itself would save."""
        return self._description.places

    def checkpoint_form(self) -> bytes:
        """CheckpointForm of what Megatron itself would save of this rank, as bytes."""
        return self._description.form

    def objects(self) -> dict[str, Any]:
        """Small values as of the last ``at``; no tensor in them shares memory with a live one."""
        return {
            "version": OBJECTS_VERSION,
            "iteration": self._iteration,
            "floating_point_operations": self._operations,
            "samples": state_parts.capture_samples(self._args),
            "data_position": self._data_position(),
            "groups": optimizers.group_scalars(self._optimizer),
            "numbers": self._numbers(),
            "scalers": optimizers.scaler_states(self._optimizer),
            "schedule": host_copy(self._scheduler.state_dict()),
            "modules": host_copy(extra_states(self._tree.keeping)),
            "flags": self._flags(),
            "rerun_machine": host_copy(state_parts.capture_rerun_machine(self._data_iterator)),
            "random": capture_random_states(),
            WISH: wish_of(self._args),
            reshaped_objects.SIZES: self._sizes,
            "copied_weights": len(self._weights),
            "fixed_arguments": state_parts.fixed_arguments(self._args),
            "arguments": self._description.changed_arguments(),
        }

    def _numbers(self) -> list[dict[int, dict[str, Any]]]:
        if not self._owned.numbers():
            return [{} for _ in optimizers.optimizer_parts(self._optimizer)]
        return optimizers.state_numbers(self._optimizer)

    def _flags(self) -> bytes:
        """``requires_grad`` of the parameters in the order of the modules, a byte each."""
        return bytes(map(_TRAINED, self._tree.parameters.values()))

    def _load_flags(self, flags: bytes) -> None:
        """Set what ``_flags`` gave, if it is of as many parameters; older releases gave none."""
        every = self._tree.parameters.values()
        if len(flags) == len(every):
            for parameter, flag in zip(every, flags, strict=True):
                if parameter.requires_grad != bool(flag):
                    parameter.requires_grad_(bool(flag))

    def _data_position(self) -> Any:
        if not state_parts.is_external(self._args):
            return None
        if not self._began:
            return state_parts.reservation()
        return state_parts.capture_position(self._data_iterator)

    def load(self, objects: dict[str, Any]) -> None:
        """Set everything that is not a captured tensor, after those were filled in place.

        Collective over the data-parallel group with a distributed optimizer, because
        ranks gather each other's weights.
        """
        if objects.get("version") != OBJECTS_VERSION:
            raise LayoutMismatchError(
                f"the snapshot's objects have version {objects.get('version')}, this release "
                f"reads {OBJECTS_VERSION}; restore with the release that took it"
            )
        # Snapshots of earlier releases do not say.
        state_parts.check_arguments(self._args, objects.get("fixed_arguments", {}))
        with torch.no_grad():
            stored = {name: weight.clone() for name, weight in self._weights.items()}
            gathers = optimizers.derive_weights(self._optimizer)
            for name, weight in stored.items():
                self._weights[name].copy_(weight)
            if gathers:
                optimizers.gather_weights(self._model, self._optimizer)
        self._load_objects(objects)

    def _load_objects(self, objects: dict[str, Any]) -> None:
        self._args.iteration = self._iteration = objects["iteration"]
        self._operations = objects["floating_point_operations"]
        self._args.num_floating_point_operations_so_far = self._operations
        state_parts.restore_samples(self._args, objects["samples"])
        # Groups before the schedule, which computes rates from what they hold.
        own = self._own_group_values()
        optimizers.load_group_scalars(self._optimizer, objects["groups"], own=own)
        optimizers.load_state_numbers(self._optimizer, objects["numbers"])
        optimizers.load_scaler_states(self._optimizer, objects["scalers"])
        state_parts.restore_schedule(self._scheduler, objects["schedule"])
        load_extra_states(self._tree.keeping, objects["modules"])
        self._load_flags(objects.get("flags", b""))
        state_parts.restore_rerun_machine(objects["rerun_machine"])
        self._loaded = objects
        self._restore_random_states(objects)

    def _restore_random_states(self, objects: dict[str, Any]) -> None:
        """Set them, unless they are of another layout: then the rank's own stay."""
        if objects["random"] is not None:
            restore_random_states(objects["random"])

    def expect_reshape(self) -> None:
        """LayoutMismatchError naming captured tensors that cannot come from another layout."""
        unknown = sorted(live_tensors(self).keys() - self._description.places.keys())
        if unknown:
            reason = self._description.problem or "each rank's is its own"
            raise LayoutMismatchError(
                f"{len(unknown)} tensors have no known place in the unsharded model, {unknown[0]} "
                f"first ({reason}), so the snapshot cannot be taken into another layout: start "
                "with the old flags and number of ranks"
            )

    def reshape_objects(
        self, shard_id: str, origins: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        """Objects for ``load`` from those of old shards, by the rules of Megatron's own loader."""
        from megatron.training.utils import print_rank_0

        self.expect_reshape()
        identity = [
            key for key in optimizers.group_identity() if key not in self._own_group_values()
        ]
        objects, notes = reshaped_objects.reshaped(self.objects(), shard_id, origins, identity)
        for note in notes:
            print_rank_0(f"  snapshot of another layout: {note}")
        return objects

    def _own_group_values(self) -> tuple[str, ...]:
        """Values of parameter groups that the flags decide, and not the snapshot."""
        overriding = getattr(self._args, "override_opt_param_scheduler", False)
        return optimizers.SCHEDULED if overriding else ()

    def begin(self, data_iterator: Any) -> None:
        """The data iterators exist: training begins.

        Sets what could not be set before, and the generators again: Megatron builds its
        iterators between set-up and training, and each draws a seed from torch's generator.
        """
        self._data_iterator, self._began = data_iterator, True
        if state_parts.is_external(self._args):
            state_parts.check_position(data_iterator)
            if self._loaded is not None:
                state_parts.restore_position(data_iterator, self._loaded["data_position"])
        if self._loaded is not None:
            self._restore_random_states(self._loaded)
            self._loaded = None
