"""The complete training state of one Megatron rank, as the snapshot manager sees it.

Captured are the tensors that the optimizer owns (fp32 masters, moments, steps), frozen
parameters, buffers, and small objects.  Low-precision weights are not: they are the
masters, rounded, and with overlapped parameter gathers they are stale at the end of an
iteration anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ft.errors import LayoutMismatchError
from megatron_ft.megatron import counters
from megatron_ft.megatron import optimizer as optimizers
from megatron_ft.megatron.model import (
    frozen_parameters,
    gather_weights,
    named_buffers,
    named_parameters,
)
from megatron_ft.megatron.random_states import capture_random_states, restore_random_states

OBJECTS_VERSION = 1


class MegatronState:
    """Implements ``capture.state.TrainingState`` for a model, its optimizer and its schedule.

    Making one creates the optimizer's state where it is still empty and checks that the
    weights follow from the masters (ConfigError if not).  ``at`` must be called before
    ``objects``: iteration and FLOPs are Megatron's local variables, not on its arguments.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, args: Any) -> None:
        self._model = list(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._args = args
        self._iteration = 0
        self._operations: float = 0
        self._data_iterator: Any = None
        self._loaded_random: dict[str, Any] | None = None
        optimizers.materialise(optimizer)
        optimizers.check_weights_follow(optimizer)
        names = {id(tensor): name for name, tensor in named_parameters(model).items()}
        self._masters = optimizers.masters(optimizer, names)

    def at(self, iteration: int, floating_point_operations: float, data_iterator: Any) -> None:
        """Say where training stands: what ``objects`` will report until the next call."""
        self._iteration = iteration
        self._operations = floating_point_operations
        self._data_iterator = data_iterator

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments, steps and frozen parameters: changed by the optimizer alone."""
        found = dict(frozen_parameters(self._model))
        for master in self._masters:
            found[f"{master.name}.main"] = master.tensor.detach()
            for name, value in master.inner.state[master.tensor].items():
                if isinstance(value, torch.Tensor):
                    found[f"{master.name}.{name}"] = value.detach()
        return found

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer: forward may change it (routing statistics, expert biases)."""
        return {name: buffer.detach() for name, buffer in named_buffers(self._model).items()}

    def replicas(self) -> dict[str, Any]:
        """Without the distributed optimizer, masters and moments are equal on a whole group.

        The group is the data-parallel one with context parallelism, for experts theirs.
        """
        parts = optimizers.optimizer_parts(self._optimizer)
        shared = {id(part.optimizer) for part in parts if not optimizers.is_distributed(part)}
        groups = _replica_groups()
        return {
            f"{master.name}.{name}": groups[bool(getattr(master.parameter, "allreduce", True))]
            for master in self._masters
            if id(master.inner) in shared
            for name in ("main", *master.inner.state[master.tensor])
        }

    def objects(self) -> dict[str, Any]:
        """Small values as of the last ``at``; no tensor in them shares memory with a live one."""
        return {
            "version": OBJECTS_VERSION,
            "iteration": self._iteration,
            "floating_point_operations": self._operations,
            "samples": counters.capture_samples(self._args),
            "groups": optimizers.group_scalars(self._optimizer),
            "scalers": optimizers.scaler_states(self._optimizer),
            "schedule": optimizers.host_copy(self._scheduler.state_dict()),
            "rerun_machine": optimizers.host_copy(
                counters.capture_rerun_machine(self._data_iterator)
            ),
            "random": capture_random_states(),
        }

    def load(self, objects: dict[str, Any]) -> None:
        """Set everything that is not a captured tensor, after those were filled in place.

        Collective over the data-parallel group with the distributed optimizer, because
        ranks gather each other's weights.
        """
        if objects.get("version") != OBJECTS_VERSION:
            raise LayoutMismatchError(
                f"the snapshot's objects have version {objects.get('version')}, this release "
                f"reads {OBJECTS_VERSION}; restore with the release that took it"
            )
        with torch.no_grad():
            if optimizers.derive_weights(self._optimizer):
                gather_weights(self._model)
        self._load_objects(objects)

    def _load_objects(self, objects: dict[str, Any]) -> None:
        self._args.iteration = self._iteration = objects["iteration"]
        self._operations = objects["floating_point_operations"]
        self._args.num_floating_point_operations_so_far = self._operations
        counters.restore_samples(self._args, objects["samples"])
        # Groups before the schedule, which computes rates from what they hold.
        optimizers.load_group_scalars(self._optimizer, objects["groups"])
        optimizers.load_scaler_states(self._optimizer, objects["scalers"])
        counters.restore_schedule(self._scheduler, objects["schedule"])
        counters.restore_rerun_machine(objects["rerun_machine"])
        self._loaded_random = objects["random"]
        self.restore_random_states()

    def restore_random_states(self) -> None:
        """Set the generators as loaded, again; nothing if nothing was loaded.

        Megatron builds its data iterators between set-up and training, and each draws a
        seed from torch's generator: call this where training begins.
        """
        if self._loaded_random is not None:
            restore_random_states(self._loaded_random)


def _replica_groups() -> dict[bool, Any]:
    """The groups whose ranks hold equal state: True for dense parameters, False for experts'."""
    from megatron.core import mpu

    return {
        True: mpu.get_data_parallel_group(with_context_parallel=True),
        False: mpu.get_expert_data_parallel_group(),
    }
