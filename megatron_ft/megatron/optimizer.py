"""Megatron's optimizers as fp32 masters, their moments, and the weights that follow from them.

Covers DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer,
LayerWiseDistributedOptimizer and chains of them; what is inside these is the matter of
:mod:`megatron_ft.trainer.master_tensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.optimizer_classes import register_optimizer, shared_out
from megatron_ft.trainer.state import host_copy

_MODEL_AND_MASTER_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Attributes in which the optimizers keep parameters and, in the same order, their masters.

With the precision-aware optimizer the inner one updates the weights themselves, as far as
they belong to this rank, and keeps masters in its own state.
"""

_LOW_PRECISION_GROUPS = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("float16_groups", "float16_groups", "fp32_from_float16_groups"),
)
"""Attributes with parameters, their weights on this rank, and the masters of these."""


MAIN = ".main"
"""Ends the names of masters, which are captured."""

FUSED, MUON = "FusedAdam", "TensorParallelMuon"
"""Classes whose state Megatron creates as their first step would: that of Transformer Engine and of
Apex, and Megatron's own."""

LAYER_WISE = "LayerWiseDistributedOptimizer"
"""The class of a chain in which each data-parallel rank updates some parameters, these whole."""

SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult")
"""Values of a parameter group that Megatron's schedule reads, in the place of its own values."""

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Keys of releases that do not name them."""

WEIGHT = ".weight_copy"
"""Ends the names of low-precision weights that are captured in addition to their masters."""


class Master(NamedTuple):
    """One tensor that an inner optimizer updates; ``parameter`` is the model's own.

    ``distributed`` is True if no other data-parallel rank holds the same: each has a shard of it,
    or one has all of it.
    """

    name: str
    tensor: torch.Tensor
    parameter: torch.Tensor
    inner: Any
    distributed: bool


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that own something on this rank, in order."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [part for link in chained for part in optimizer_parts(link)]
    is_stub = getattr(optimizer, "is_stub_optimizer", False)
    return [] if is_stub or optimizer.optimizer is None else [optimizer]


def layer_wise(optimizer: Any) -> list[Any]:
    """The links of a chain that give whole parameters to single data-parallel ranks."""
    if type(optimizer).__name__ == LAYER_WISE:
        return [optimizer]
    return [
        found for link in getattr(optimizer, "chained_optimizers", ()) for found in layer_wise(link)
    ]


def is_distributed(part: Any) -> bool:
    """True if each data-parallel rank owns a shard of its own of this optimizer's state."""
    return hasattr(part, "shard_fp32_groups")


def _pairs(part: Any, names: tuple[tuple[str, str], ...]) -> Iterator[tuple[Any, Any]]:
    for left, right in names:
        for lefts, rights in zip(getattr(part, left, ()), getattr(part, right, ()), strict=True):
            yield from zip(lefts, rights, strict=True)


def masters(optimizer: Any, names: dict[int, str]) -> list[Master]:
    """All tensors that inner optimizers update, named after the model's parameters.

    ``names`` maps ``id`` of a model parameter to its name.
    """
    found = []
    whole = {id(part) for link in layer_wise(optimizer) for part in optimizer_parts(link)}
    for number, part in enumerate(optimizer_parts(optimizer)):
        owner = {id(master): model for model, master in _pairs(part, _MODEL_AND_MASTER_GROUPS)}
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                parameter = owner.get(id(tensor), tensor)
                name = _master_name(number, names[id(parameter)])
                distributed = is_distributed(part) or id(part) in whole
                found.append(Master(name, tensor, parameter, part.optimizer, distributed))
    return found


def master_names(optimizer: Any, names: dict[int, str]) -> dict[str, str]:
    """The name of each parameter's master by the parameter's own, whichever ranks hold it.

    Collective over data-parallel ranks that own whole parameters.
    """
    found = {names[id(m.parameter)]: m.name for m in masters(optimizer, names)}
    for number, part in enumerate(optimizer_parts(optimizer)):
        for buffer in part.buffers if is_distributed(part) else ():
            for parameter in buffer.param_index_map:
                name = names[id(parameter)]
                found[name] = _master_name(number, name)
    for link in layer_wise(optimizer):
        for name in ("dp_cp", "expt_dp"):
            if (group := getattr(link.pg_collection, name, None)) is not None:
                every: list[Any] = [None] * group.size()
                torch.distributed.all_gather_object(every, found, group=group)
                found = {key: value for owned in every for key, value in owned.items()}
    return found


def _master_name(number: int, parameter: str) -> str:
    return f"optimizer{number}.{parameter}"


def materialise(optimizer: Any) -> None:
    """Create the state as the first step would, so that a layout can be planned before it.

    Raises ConfigError for an optimizer that keeps something unknown.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        if type(inner).__name__ in (FUSED, MUON):
            # Megatron's own function is right for these only: for others it leaves out ``step``,
            # without which torch's Adam fails.
            part.init_state_fn(inner, part.config)
        for group, parameter in master_tensors.parameters(inner):
            master_tensors.create_state(inner, group, parameter)


register_optimizer(MUON, create=lambda *_: {}, state=shared_out(["momentum_buffer"]))


def group_scalars(optimizer: Any) -> list[list[dict[str, Any]]]:
    return [master_tensors.group_scalars(part.optimizer) for part in optimizer_parts(optimizer)]


def load_group_scalars(
    optimizer: Any, scalars: Sequence[Sequence[dict[str, Any]]], *, own: Collection[str] = ()
) -> None:
    """Set what :func:`group_scalars` gave but the names in ``own``; tensors are filled in place."""
    for part, groups in zip(optimizer_parts(optimizer), scalars, strict=True):
        taken = [{n: v for n, v in group.items() if n not in own} for group in groups]
        master_tensors.load_group_scalars(part.optimizer, taken)


def group_identity() -> tuple[str, ...]:
    """The keys by which Megatron tells parameter groups apart when it loads a checkpoint."""
    from megatron.core.optimizer import optimizer

    found = getattr(optimizer, "param_group_identifier_keys", _GROUP_IDENTITY)
    return tuple(found)


def state_numbers(optimizer: Any) -> list[dict[int, dict[str, Any]]]:
    """Values of inner optimizers that are neither tensors nor in groups, by parameter position.

    Most keep nothing: thousands of empty dicts would cost time at every snapshot.
    """
    return [
        {
            position: values
            for position, (_, parameter) in enumerate(master_tensors.parameters(part.optimizer))
            if (values := master_tensors.state_numbers(part.optimizer, parameter))
        }
        for part in optimizer_parts(optimizer)
    ]


def load_state_numbers(optimizer: Any, numbers: Sequence[dict[int, dict[str, Any]]]) -> None:
    for part, by_position in zip(optimizer_parts(optimizer), numbers, strict=True):
        found = [parameter for _, parameter in master_tensors.parameters(part.optimizer)]
        for position, values in by_position.items():
            part.optimizer.state[found[position]].update(values)


def scaler_states(optimizer: Any) -> list[Any]:
    """Loss scale and its counters per optimizer; None where bf16 or fp32 needs no scaling."""
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer_parts(optimizer)]
    return [host_copy(scaler.state_dict()) if scaler else None for scaler in scalers]


def load_scaler_states(optimizer: Any, states: Sequence[Any]) -> None:
    for part, state in zip(optimizer_parts(optimizer), states, strict=True):
        if state is not None:
            part.grad_scaler.load_state_dict(state)


def low_precision(
    optimizer: Any, names: dict[int, str]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(master's name, weight, master) of each weight with an fp32 master that this rank updates."""
    for number, part in enumerate(optimizer_parts(optimizer)):
        for attributes in _LOW_PRECISION_GROUPS:
            lists = [getattr(part, name, ()) for name in attributes]
            for groups in zip(*lists, strict=True):
                for parameter, weight, master in zip(*groups, strict=True):
                    if master is not None:
                        yield _master_name(number, names[id(parameter)]), weight, master


def derive_weights(optimizer: Any) -> bool:
    """Round masters into the weights; True if ranks have to gather each other's afterwards."""
    parts = optimizer_parts(optimizer)
    for part in parts:
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    return bool(layer_wise(optimizer)) or any(is_distributed(part) for part in parts)


def derived(optimizer: Any, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Memory that ``derive_weights`` and ``gather_weights`` fill, of these model parameters.

    Those of a flat buffer are gathered there, wherever they lie by now.
    """
    parts = [part for part in optimizer_parts(optimizer) if is_distributed(part)]
    buffers = [one for part in parts for one in part.buffers if one.param_data is not None]
    gathered = {id(parameter) for one in buffers for parameter in one.param_index_map}
    # Of other kinds (fp8), the buffer has other memory than its parameters say.
    rest = [w for w in weights if id(w) not in gathered or type(w) is not torch.nn.Parameter]
    return [*(one.param_data for one in buffers), *rest]


def gather_weights(model: Sequence[Any], optimizer: Any) -> None:
    """Send each data-parallel rank's updated weights to the others, and wait for theirs.

    A collective; only where ``derive_weights`` returned True, else all ranks update all weights.
    """
    unordered = [link for link in layer_wise(optimizer) if not link.use_buffer_param_sync]
    for link in unordered:
        # Parameters in the order of the model: no range of the buffer is one rank's.
        link.allgather_params()
    for chunk in () if unordered else model:
        chunk.start_param_sync(force_sync=True)
