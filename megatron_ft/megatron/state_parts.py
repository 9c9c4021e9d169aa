"""Parts of Megatron's training state outside the optimizer: captured, restored, and checked.

- Counters on Megatron's arguments, the schedule, and the rerun machine.
- Arguments that must not change between incarnations, though every tensor would still fit:
  those that Megatron compares when it loads a checkpoint of its own (``check_checkpoint_args`` in
  megatron/training/checkpointing.py).  With another number of heads the weights are another model.
- Every generator that training draws from, Megatron's tracker included; each rank's own.
- The position of an external data loader.  That of Megatron's own is the number of samples used.
- Names and tensors of the model's chunks, and the ranks that hold the same of the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import is_not
from typing import Any

from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.megatron.optimizer import Master
from megatron_ft.trainer.coverage import Named
from megatron_ft.trainer.flat_coverage import members
from megatron_ft.trainer.module_tree import ModuleTree
from megatron_ft.trainer.state import RngState, host_copy

_PLAIN = (bool, int, float, str, type(None))
SAMPLE_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def capture_samples(args: Any) -> dict[str, int]:
    """Samples used so far; they are the position of Megatron's own data loaders."""
    return {name: getattr(args, name) for name in SAMPLE_COUNTERS}


def restore_samples(args: Any, samples: dict[str, int]) -> None:
    """Set them, and the number of micro-batches that follows, as loading a checkpoint does."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    for name in SAMPLE_COUNTERS:
        setattr(args, name, samples[name])
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)


def restore_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Set the learning-rate and weight-decay schedule.

    Megatron's loader advances the schedule from where it is, so it has to be at its start.
    """
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def capture_rerun_machine(data_iterator: Any) -> dict[str, Any] | None:
    """State of Megatron's rerun machine, or None where it is off."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state: dict[str, Any] | None = get_rerun_state_machine().state_dict(data_iterator, "torch_dist")
    if state is None:
        return None
    # Wrapped for Megatron's checkpoint files; what loads it wants the plain value.
    return {**state, "sharded": getattr(state["sharded"], "data", state["sharded"])}


def restore_rerun_machine(state: dict[str, Any] | None) -> None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    if state is not None:
        with _quiet("megatron.core.rerun_state_machine"):
            get_rerun_state_machine().load_state_dict(state)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    # It announces that it will rerun a step, which is true only of its own checkpoints.
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
_VOCABULARY = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
"""Compared if there is a ``--vocab-file``."""


def fixed_arguments(args: Any) -> dict[str, Any]:
    names = (*_MODEL, *(_VOCABULARY if getattr(args, "vocab_file", None) else ()))
    return {name: getattr(args, name, None) for name in names}


def check_arguments(args: Any, captured: Mapping[str, Any]) -> None:
    """Raise LayoutMismatchError that lists each argument that is not as it was ``captured``."""
    changed = [
        f"--{name.replace('_', '-')} was {captured[name]} and is {value}"
        for name, value in fixed_arguments(args).items()
        if name in captured and captured[name] != value
    ]
    if changed:
        raise LayoutMismatchError(
            f"the snapshot is of another model, though its tensors fit: {'; '.join(changed)}. "
            "Run with the old flags, or remove the job's snapshots with `megatron-ft clean`"
        )


class ChangedArguments:
    """Arguments of plain values that change in training, as compared with those of its start."""

    def __init__(self, args: Any) -> None:
        self._args, self._known = args, dict(vars(args))

    def now(self) -> dict[str, Any]:
        now = vars(self._args)
        if list(self._known) != list(now):
            # In the order of now; what was not there then is known as something equal to nothing.
            self._known = {name: self._known.get(name, self) for name in now}
        # Hundreds of arguments, nearly all the very objects that they were: compared in C.
        others = compress(now.items(), map(is_not, now.values(), self._known.values()))
        return {
            name: value
            for name, value in others
            if isinstance(value, _PLAIN) and self._known[name] != value
        }


def capture_random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's, the device's, and the tracker's named states, as of now."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    plain = {name: megatron_random.convert_cuda_rng_state(s) for name, s in states.items()}
    return {"generators": RngState().state_dict(), "tracker": host_copy(plain)}


def restore_random_states(captured: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    tracker = tensor_parallel.get_cuda_rng_tracker()
    graph_safe = megatron_random.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: megatron_random.convert_cuda_rng_state(state.clone(), to_graphable=graph_safe)
            for name, state in captured["tracker"].items()
        }
    )
    # After the tracker: converting a state passes through the device's generator.
    RngState().load_state_dict(captured["generators"])


RESERVED_BYTES = 1 << 20
"""Room that is planned for the state of an external loader, which exists only later."""

_METHODS = (("save_state", "restore_state"), ("state_dict", "load_state_dict"))
"""Pairs by which loaders give and take their state; the first that a loader has is used."""


def is_external(args: Any) -> bool:
    return getattr(args, "dataloader_type", None) == "external"


def reservation() -> bytes:
    """Stands for the state of a loader that does not exist yet, to reserve its room."""
    return bytes(RESERVED_BYTES)


def _loaders(data_iterator: Any) -> list[Any]:
    # One per chunk of a virtual pipeline; Megatron wraps each so that a step can run again.
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [getattr(iterator, "iterable", iterator) for iterator in iterators if iterator]


def _methods(loader: Any) -> tuple[Any, Any]:
    for save, load in _METHODS:
        if callable(getattr(loader, save, None)) and callable(getattr(loader, load, None)):
            return getattr(loader, save), getattr(loader, load)
    pairs = ", or ".join(f"{save}() and {load}(state)" for save, load in _METHODS)
    raise ConfigError(
        f"the external data loader {type(loader).__module__}.{type(loader).__qualname__} has "
        f"no methods that give its position, so a restored run would read other data: "
        f"give it {pairs}, or train without --inmem-snapshot"
    )


def check_position(data_iterator: Any) -> None:
    for loader in _loaders(data_iterator):
        _methods(loader)


def capture_position(data_iterator: Any) -> list[Any]:
    return [_methods(loader)[0]() for loader in _loaders(data_iterator)]


def restore_position(data_iterator: Any, states: list[Any]) -> None:
    for loader, state in zip(_loaders(data_iterator), states, strict=True):
        _methods(loader)[1](state)


def replica_group(master: Master, args: Any) -> Any:
    """The process group whose ranks hold the same master and moments, None if no other does.

    That is the whole data-parallel group with context parallelism, for experts theirs.
    With the distributed optimizer every rank owns a part, and the ranks with the same place
    in its other instances, if there are any, hold that part too.
    """
    from megatron.core import mpu

    if master.distributed:
        if getattr(args, "num_distributed_optimizer_instances", 1) == 1:
            return None
        return mpu.get_inter_distributed_optimizer_instance_group()
    return weight_group(master.parameter)


def weight_group(parameter: Any) -> Any:
    """The process group whose ranks train the same parameter of the model."""
    from megatron.core import mpu

    if getattr(parameter, "allreduce", True):
        return mpu.get_data_parallel_group(with_context_parallel=True)
    return mpu.get_expert_data_parallel_group()


def plain_name(name: str) -> str:
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def module_tree(model: Sequence[Any]) -> ModuleTree:
    """Modules, parameters and buffers of this rank; chunks are the stages of a virtual pipeline.

    Buffers that no state dict would hold are among them: token counters of experts, for example,
    are not persistent and still decide how training continues.
    """
    return ModuleTree(lambda: _unwrapped(model), _name_in_chunk)


def members_of(model: Sequence[Any]) -> list[Named]:
    return members(lambda: _unwrapped(model), _name_in_chunk)


def _unwrapped(model: Sequence[Any]) -> list[Any]:
    # DistributedDataParallel.buffers is a list of gradient buffers.
    return [getattr(chunk, "module", chunk) for chunk in model]


def _name_in_chunk(number: int, name: str) -> str:
    return f"chunk{number}.{plain_name(name)}"
