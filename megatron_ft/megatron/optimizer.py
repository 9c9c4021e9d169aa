"""Megatron's optimizers as fp32 masters, their moments, and the weights that follow from them.

Covers DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer and chains of
them; what is inside these is the matter of :mod:`megatron_ft.megatron.inner_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.megatron import inner_optimizer

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

WEIGHT = ".weight_copy"
"""Ends the names of low-precision weights that are captured beside their masters."""


class Master(NamedTuple):
    """One tensor that an inner optimizer updates; ``parameter`` is the model's own.

    ``distributed`` is True if each data-parallel rank has a shard of its own of it.
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
    for number, part in enumerate(optimizer_parts(optimizer)):
        owner = {id(master): model for model, master in _pairs(part, _MODEL_AND_MASTER_GROUPS)}
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                parameter = owner.get(id(tensor), tensor)
                name = _master_name(number, names[id(parameter)])
                distributed = is_distributed(part)
                found.append(Master(name, tensor, parameter, part.optimizer, distributed))
    return found


def master_names(optimizer: Any, names: dict[int, str]) -> dict[str, str]:
    """The name of each parameter's master by the parameter's own, whichever ranks hold it."""
    found = {names[id(m.parameter)]: m.name for m in masters(optimizer, names)}
    for number, part in enumerate(optimizer_parts(optimizer)):
        for buffer in part.buffers if is_distributed(part) else ():
            for parameter in buffer.param_index_map:
                name = names[id(parameter)]
                found[name] = _master_name(number, name)
    return found


def _master_name(number: int, parameter: str) -> str:
    return f"optimizer{number}.{parameter}"


def materialise(optimizer: Any) -> None:
    """Create the state as the first step would, so that a layout can be planned before it."""
    for part in optimizer_parts(optimizer):
        inner_optimizer.materialise(part.optimizer, part.init_state_fn, part.config)


def group_scalars(optimizer: Any) -> list[list[dict[str, Any]]]:
    """Everything in the parameter groups but the parameters: rates, decay, FusedAdam's step."""
    return [
        [_without_parameters(group) for group in part.optimizer.param_groups]
        for part in optimizer_parts(optimizer)
    ]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: host_copy(value) for name, value in group.items() if name != "params"}


def load_group_scalars(optimizer: Any, scalars: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Set what :func:`group_scalars` gave; tensors among them are filled in place."""
    parts = optimizer_parts(optimizer)
    for part, groups in zip(parts, scalars, strict=True):
        for group, values in zip(part.optimizer.param_groups, groups, strict=True):
            inner_optimizer.load_group(group, values)


def state_numbers(optimizer: Any) -> list[list[dict[str, Any]]]:
    """What inner optimizers keep beside tensors and groups."""
    return [inner_optimizer.state_numbers(part.optimizer) for part in optimizer_parts(optimizer)]


def load_state_numbers(optimizer: Any, numbers: Sequence[list[dict[str, Any]]]) -> None:
    """Set what :func:`state_numbers` gave."""
    for part, values in zip(optimizer_parts(optimizer), numbers, strict=True):
        inner_optimizer.load_state_numbers(part.optimizer, values)


def scaler_states(optimizer: Any) -> list[Any]:
    """Loss scale and its counters per optimizer; None where bf16 or fp32 needs no scaling."""
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer_parts(optimizer)]
    return [host_copy(scaler.state_dict()) if scaler else None for scaler in scalers]


def load_scaler_states(optimizer: Any, states: Sequence[Any]) -> None:
    """Set what :func:`scaler_states` gave."""
    for part, state in zip(optimizer_parts(optimizer), states, strict=True):
        if state is not None:
            part.grad_scaler.load_state_dict(state)


def host_copy(value: Any) -> Any:
    """The value with every tensor in it copied to the host, detached from the live one."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(host_copy(inner) for inner in value)
    return value


def independent_weights(optimizer: Any, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Low-precision weights of this rank that are not their fp32 masters, rounded; by name.

    The others are left out of snapshots and derived on restore.  Weights differ where
    something changed them without the optimizer, until its next step sets them again.
    """
    found = {}
    for number, part in enumerate(optimizer_parts(optimizer)):
        for parameter, weight, master in _low_precision(part):
            if not same_bits(weight, master.to(weight.dtype)):
                found[f"optimizer{number}.{names[id(parameter)]}"] = weight.detach()
    return found


def low_precision_weights(optimizer: Any, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """All weights that have fp32 masters, as far as this rank updates them; by name."""
    return {
        f"optimizer{number}.{names[id(parameter)]}": weight.detach()
        for number, part in enumerate(optimizer_parts(optimizer))
        for parameter, weight, _ in _low_precision(part)
    }


def _low_precision(part: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(model parameter, its weight on this rank, the master) of each that has a master."""
    for model, weight, master in _LOW_PRECISION_GROUPS:
        lists = [getattr(part, name, ()) for name in (model, weight, master)]
        for groups in zip(*lists, strict=True):
            yield from (found for found in zip(*groups, strict=True) if found[2] is not None)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if both hold the same bytes; a NaN equals itself, -0.0 is not 0.0."""
    left, right = (t.detach().contiguous().view(-1) for t in (left, right))
    if not left.numel():
        return left.shape == right.shape and left.dtype == right.dtype
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def derive_weights(optimizer: Any) -> bool:
    """Round masters into the weights; True if ranks have to gather each other's afterwards."""
    parts = optimizer_parts(optimizer)
    for part in parts:
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    return any(is_distributed(part) for part in parts)
