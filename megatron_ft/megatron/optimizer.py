"""Megatron's optimizers as fp32 masters, their moments, and the weights that follow from them.

Covers DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer and chains of
them, around torch's, Transformer Engine's or Apex's Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.errors import ConfigError

_MODEL_AND_MASTER_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Attributes in which the optimizers keep parameters and, in the same order, their masters."""

_WEIGHT_AND_MASTER_GROUPS = (
    ("shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Low-precision weights, as far as this rank updates them, and the masters they follow from."""


class Master(NamedTuple):
    """One tensor that an inner optimizer updates; ``parameter`` is the model's own."""

    name: str
    tensor: torch.Tensor
    parameter: torch.Tensor
    inner: Any


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
                name = f"optimizer{number}.{names[id(parameter)]}"
                found.append(Master(name, tensor, parameter, part.optimizer))
    return found


def materialise(optimizer: Any) -> None:
    """Create Adam's state as its first step would, so that a layout can be planned before it."""
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            _materialise_torch_adam(part.optimizer)
        else:  # Transformer Engine's or Apex's, for which Megatron's own function is right
            part.init_state_fn(part.optimizer, part.config)


def _materialise_torch_adam(inner: torch.optim.Optimizer) -> None:
    # Megatron's own function leaves out ``step``, after which torch's Adam fails.
    for group in inner.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for tensor in group["params"]:
            if not inner.state[tensor]:
                device = tensor.device if on_device else torch.device("cpu")
                step = torch.zeros((), dtype=torch.float32, device=device)
                inner.state[tensor].update(
                    step=step, **{name: torch.zeros_like(tensor) for name in moments}
                )


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
            for name, value in values.items():
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


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


def check_weights_follow(optimizer: Any) -> None:
    """Check bit by bit that low-precision weights are their masters, rounded.

    Snapshots leave such weights out and derive them on restore.  Raises ConfigError with
    the first that differ: then a restored run would not be the one that was interrupted.
    """
    for part in optimizer_parts(optimizer):
        pairs = _pairs(part, _WEIGHT_AND_MASTER_GROUPS)
        differing = sum(not same_bits(weight, master.to(weight.dtype)) for weight, master in pairs)
        if differing:
            raise ConfigError(
                f"{differing} low-precision weights are not their fp32 masters rounded, so a "
                "snapshot without them would not restore this run; something changed weights "
                "without the optimizer (load optimizer state together with weights)"
            )


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
