"""Parts of an engine's state outside its optimizer: progress, model tensors, random states.

Progress is the engine's counters, batch size and schedules.  Model tensors are buffers and the
parameters that no optimizer owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from deepspeed_ext.optimizers.view import plain_fields, set_fields
from megatron_ft.trainer.master_tensors import as_captured
from megatron_ft.trainer.module_tree import ModuleTree, load_trained, trained
from megatron_ft.trainer.state import RngState, host_copy

COUNTERS = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "micro_steps",
    "_step_applied",
    "_unmanaged_backward_count",
    "gas_boundary_ctr",
)
"""Attributes of the engine, the last one in older releases.

DeepSpeed's own checkpoints hold the first three.
"""

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Attributes of the configuration that ``set_train_batch_size`` and its like change on the way."""

STATEFUL = ("lr_scheduler", "random_ltd_scheduler", "torch_autocast_z0_gradscaler")
"""Attributes of the engine with ``state_dict`` and ``load_state_dict``, where they are set."""

LAYER_DROP = "progressive_layer_drop"
"""Attribute of plain values, in releases that drop layers progressively."""

CURRICULUM = "curriculum_scheduler_legacy"
"""Attribute with ``get_state`` and ``set_state``: the schedule of sequence lengths."""


def capture(engine: Any) -> dict[str, Any]:
    found = ((name, getattr(engine, name, None)) for name in STATEFUL)
    states = {name: host_copy(value.state_dict()) for name, value in found if value is not None}
    curriculum = getattr(engine, CURRICULUM, None)
    layer_drop = getattr(engine, LAYER_DROP, None)
    return {
        "counters": plain_fields(engine, COUNTERS),
        "batch": plain_fields(engine._config, BATCH),
        "schedules": states,
        "layer_drop": {} if layer_drop is None else plain_fields(layer_drop),
        "curriculum": None if curriculum is None else host_copy(curriculum.get_state()),
    }


def restore(engine: Any, captured: Mapping[str, Any]) -> None:
    set_fields(engine, captured["counters"])
    set_fields(engine._config, captured.get("batch", {}))
    if engine.pipeline_parallelism:
        engine.micro_batches = engine.gradient_accumulation_steps()
    for name, state in captured["schedules"].items():
        schedule = getattr(engine, name, None)
        if schedule is not None:
            schedule.load_state_dict(state)
    curriculum, layer_drop = getattr(engine, CURRICULUM, None), getattr(engine, LAYER_DROP, None)
    if curriculum is not None and captured["curriculum"] is not None:
        curriculum.set_state(captured["curriculum"])
    if layer_drop is not None:
        set_fields(layer_drop, captured["layer_drop"])


BUFFER, FROZEN = "buffer/", "frozen/"
"""Begin the names of captured buffers and of parameters that no optimizer owns."""


class ModelTensors:
    """An engine's model as of the last ``refresh``: its ``tree``, and by name what is captured.

    ``buffers`` are all, those that no state dict would hold included; a shared one once.
    ``frozen`` is this rank's part of all parameters but the owned ones, which follow from masters:
    the frozen ones, and trainable ones that the optimizer was not given; a tied one once.
    """

    def __init__(self, engine: Any, owned: Callable[[], Iterable[torch.Tensor]]) -> None:
        """``owned`` gives the parameters that follow from masters.  Nothing is read yet."""
        self.tree = ModuleTree(lambda: [engine.module])
        self.buffers: dict[str, torch.Tensor] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self._find_owned = owned
        self._sorted: tuple[Mapping[str, Any], list[str]] = {}, []

    def refresh(self) -> None:
        self.tree.refresh()
        owned = set(map(id, self._find_owned()))
        # ZeRO-3 leaves an empty tensor in the model, and its partition beside it.
        self.frozen = {
            f"{FROZEN}{name}": as_captured(getattr(parameter, "ds_tensor", parameter))
            for name, parameter in self.tree.parameters.items()
            if id(parameter) not in owned
        }
        buffers = self.tree.buffers.items()
        self.buffers = {f"{BUFFER}{name}": as_captured(tensor) for name, tensor in buffers}

    def find_frozen(self, name: str) -> torch.Tensor | None:
        """The tensor that ``frozen`` would hold by this name if no optimizer owned it."""
        parameter = self.tree.parameters.get(name.removeprefix(FROZEN))
        if parameter is None or not name.startswith(FROZEN):
            return None
        return as_captured(getattr(parameter, "ds_tensor", parameter))

    def flags(self, kept: Mapping[Any, Any]) -> dict[str, bytes]:
        """A byte for each parameter, in the order of names: whether it is to be trained, and
        whether ``kept``, the state of the optimizer, has it.  In calls that loop in C."""
        every, known = self._in_order(), set(map(id, kept))
        return {
            "trained": trained(every),
            "kept": bytes(map(known.__contains__, map(id, every))),
        }

    def load_flags(self, flags: Mapping[str, bytes], kept: MutableMapping[Any, Any]) -> bool:
        """Set what ``flags`` gave, if it is of as many parameters; True if that changes any."""
        every = self._in_order()
        if flags == self.flags(kept) or not load_trained(every, flags.get("trained", b"")):
            return False
        for parameter, has in zip(every, flags["kept"], strict=True):
            if not has:
                kept.pop(parameter, None)
        return True

    def _in_order(self) -> list[torch.nn.Parameter]:
        every = self.tree.parameters
        if self._sorted[0] is not every:
            self._sorted = every, sorted(every)
        return list(map(every.__getitem__, self._sorted[1]))

    def forget(self) -> None:
        self.tree.forget()
        self.buffers, self.frozen = {}, {}


class RandomStates:
    """Python, numpy, torch on CPU and CUDA, and activation checkpointing's named states.

    DeepSpeed saves none of them.
    """

    def state_dict(self) -> dict[str, Any]:
        return {
            "generators": RngState().state_dict(),
            "tracker": {name: _copy(state) for name, state in _tracker().get_states().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _tracker().set_states({name: _copy(value) for name, value in state["tracker"].items()})
        RngState().load_state_dict(state["generators"])


def _copy(state: Any) -> Any:
    # `fork` of the tracker puts new tensors into its dict, yet a state may be set in place.
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def _tracker() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing.get_cuda_rng_tracker()
