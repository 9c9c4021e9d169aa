"""The complete training state of one Megatron rank, as the snapshot manager sees it.

Captured are the tensors that the optimizer owns (fp32 masters, moments, steps), frozen
parameters, buffers, and small objects.  Low-precision weights are not as long as they are
the masters, rounded; with overlapped parameter gathers they are stale at the end of an
iteration anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_ft.checkpoint.framework_state import Description, FrameworkState
from megatron_ft.checkpoint.native import wish_of
from megatron_ft.megatron import optimizer as optimizers
from megatron_ft.megatron import reshaped_objects, state_parts
from megatron_ft.megatron.logical_map import RankTensors, describe_rank
from megatron_ft.megatron.optimizer import MAIN, WEIGHT
from megatron_ft.megatron.state_parts import (
    ChangedArguments,
    capture_random_states,
    module_tree,
    replica_group,
    restore_random_states,
    weight_group,
)
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.coverage import Named
from megatron_ft.trainer.master_tensors import MasterTensors, Owned, Weight, as_captured
from megatron_ft.trainer.module_tree import (
    extra_states,
    load_extra_states,
    load_trained,
    trained,
)
from megatron_ft.trainer.start_choice import WISH
from megatron_ft.trainer.state import host_copy

_SHARDED = ("overlap_param_gather", "use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
"""Arguments with which no rank need have all weights at the end of an iteration."""
_MAIN = MAIN.removeprefix(".")


class MegatronState(FrameworkState):
    """The FrameworkState of a model, its optimizer and its schedule.

    Making one creates the optimizer's state where it is still empty, and finds out which
    weights do not follow from masters: those are captured too.  ``at`` must be called
    before ``objects``: iteration and FLOPs are Megatron's local variables, not on its
    arguments.  Raises ConfigError for an optimizer that keeps something unknown.
    """

    version = 3
    advice = (
        "make them submodules of the model that model_provider returns; ignore this for what is "
        "loaded anew at each start and never changes"
    )

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, args: Any) -> None:
        super().__init__()
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
        self._find_copied("low-precision weights")
        every = optimizers.master_names(optimizer, self._names)
        self._trained = {key for key, name in self._names.items() if name in every}
        captured = {**self.tensors(), **self.boundary_tensors()}
        tensors = RankTensors(
            captured={name: one for name, one in captured.items() if name not in self._copied},
            model={**self._tree.parameters, **self._tree.buffers},
            masters=tuple(self._masters),
            master_names=every,
        )
        self._changed_arguments = ChangedArguments(args)
        self._description = describe_rank(args, self._model, optimizer, scheduler, tensors)

    def at(self, iteration: int, floating_point_operations: float, data_iterator: Any) -> None:
        self._iteration = iteration
        self._operations = floating_point_operations
        self._data_iterator = data_iterator

    def refresh(self) -> None:
        self._tree.refresh()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments, steps, and parameters that no rank's optimizer has."""
        every = self._tree.parameters.items()
        frozen = {name: as_captured(p) for name, p in every if id(p) not in self._trained}
        copies = {weight.name: weight.tensor for weight in self._copies()}
        return {**frozen, **copies, **self._owned.tensors()}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer: forward may change it (routing statistics, expert biases)."""
        return {name: as_captured(buffer) for name, buffer in self._tree.buffers.items()}

    def compared(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """The model's weights, as its data-parallel ranks have them when an iteration has ended.

        None where they are gathered while the next one runs, or sharded.
        """
        if any(getattr(self._args, name, False) for name in _SHARDED):
            return {}
        every = self._tree.parameters.items()
        return {name: (weight, weight_group(weight)) for name, weight in every}

    def _weights(self) -> Iterator[Weight]:
        groups = {master.name: replica_group(master, self._args) for master in self._masters}
        for name, weight, master in optimizers.low_precision(self._optimizer, self._names):
            yield Weight(f"{name}{WEIGHT}", weight.detach(), master, groups.get(name))

    def _publish_targets(self) -> list[torch.Tensor]:
        weights = (p for p in self._tree.parameters.values() if id(p) in self._trained)
        return optimizers.derived(self._optimizer, weights)

    def _replicated(self) -> Iterator[tuple[Iterable[str], Any]]:
        for master in self._masters:
            if (group := replica_group(master, self._args)) is not None:
                kept = master_tensors.state_tensors(master.inner, master.tensor)
                yield [f"{master.name}.{name}" for name in (_MAIN, *kept)], group

    def _inner_optimizers(self) -> dict[str, Any]:
        parts = optimizers.optimizer_parts(self._optimizer)
        return {f"optimizer{number}": part.optimizer for number, part in enumerate(parts)}

    def _members(self) -> list[Named]:
        return state_parts.members_of(self._model)

    def _known(self) -> dict[str, Any]:
        parts = optimizers.optimizer_parts(self._optimizer)
        return {"optimizer": self._optimizer, "scheduler": self._scheduler, "parts": parts}

    def _described(self) -> Description:
        return self._description

    def objects(self) -> dict[str, Any]:
        """Small values as of the last ``at``; no tensor in them shares memory with a live one."""
        return {
            "version": self.version,
            "iteration": self._iteration,
            "floating_point_operations": self._operations,
            "samples": state_parts.capture_samples(self._args),
            "data_position": self._data_position(),
            "groups": optimizers.group_scalars(self._optimizer),
            "numbers": self._numbers(),
            "scalers": optimizers.scaler_states(self._optimizer),
            "schedule": host_copy(self._scheduler.state_dict()),
            "modules": host_copy(extra_states(self._tree.keeping)),
            "flags": trained(self._tree.parameters.values()),
            "rerun_machine": host_copy(state_parts.capture_rerun_machine(self._data_iterator)),
            "random": capture_random_states(),
            WISH: wish_of(self._args),
            reshaped_objects.SIZES: self._sizes,
            "copied_weights": len(self._copied),
            "fixed_arguments": state_parts.fixed_arguments(self._args),
            "arguments": self._changed_arguments.now(),
        }

    def _numbers(self) -> list[dict[int, dict[str, Any]]]:
        if not self._owned.numbers():
            return [{} for _ in optimizers.optimizer_parts(self._optimizer)]
        return optimizers.state_numbers(self._optimizer)

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
        self._require_version(objects)
        # Snapshots of earlier releases do not say.
        state_parts.check_arguments(self._args, objects.get("fixed_arguments", {}))
        with torch.no_grad():
            stored = [(weight.tensor, weight.tensor.clone()) for weight in self._copies()]
            gathers = optimizers.derive_weights(self._optimizer)
            for weight, content in stored:
                weight.copy_(content)
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
        # Older releases gave none.
        load_trained(self._tree.parameters.values(), objects.get("flags", b""))
        state_parts.restore_rerun_machine(objects["rerun_machine"])
        self._loaded = objects
        self._restore_random_states(objects)

    def _restore_random_states(self, objects: dict[str, Any]) -> None:
        """Set them, unless they are of another layout: then the rank's own stay."""
        if objects["random"] is not None:
            restore_random_states(objects["random"])

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

    def training_begins(self, data_iterator: Any) -> None:
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
