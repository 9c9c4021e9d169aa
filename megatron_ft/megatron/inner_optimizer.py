"""The optimizer inside Megatron's wrappers: what it keeps, and how that state begins.

Recognised by the layout of its state, because the classes come from packages that may not
be installed:

- torch's Adam and AdamW: moments and a ``step`` tensor for each parameter,
- torch's SGD: ``momentum_buffer`` for each parameter,
- FusedAdam of Apex: moments for each parameter, ``step`` in the group,
- FusedAdam of Transformer Engine: the same, moments of any dtype with their scales in
  ``_scales``, and with ``master_weights`` a ``master_param`` for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_ft.errors import ConfigError

KNOWN_STATE = frozenset(
    ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param", "momentum_buffer")
)
"""Names in the state of one parameter that are known to be all that decides the next step."""

SCALES = "_scales"
"""Attribute of Transformer Engine's FusedAdam: by parameter, the scales of its fp8 moments."""

APEX_MASTERS = "param_groups_master"
"""Attribute in which Apex's FusedAdam keeps masters of its own, outside its state."""


def materialise(inner: Any, init_state: Any, config: Any) -> None:
    """Create state that is still empty as the first step would.

    ``init_state`` is Megatron's function for it, right for FusedAdam only, and ``config``
    what it wants beside the optimizer.  Raises ConfigError for an optimizer that keeps
    something unknown.
    """
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        _materialise_adam(inner)
    elif isinstance(inner, torch.optim.SGD):
        _materialise_sgd(inner)
    elif type(inner).__name__ == "FusedAdam":
        init_state(inner, config)
    else:
        raise ConfigError(
            f"the optimizer {_name(inner)} is not known: snapshots know Adam and AdamW of "
            "torch, FusedAdam of Transformer Engine and of Apex, and torch's SGD. Use one of "
            "these, or train without --inmem-snapshot"
        )
    _check_known(inner)


def _name(inner: Any) -> str:
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def _parameters(inner: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _materialise_adam(inner: torch.optim.Optimizer) -> None:
    # Megatron's own function leaves out ``step``, after which torch's Adam fails.
    for group, parameter in _parameters(inner):
        if inner.state[parameter]:
            continue
        on_device = group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        inner.state[parameter].update(
            step=torch.zeros((), dtype=torch.float32, device=device),
            **{name: torch.zeros_like(parameter) for name in moments},
        )


def _materialise_sgd(inner: torch.optim.Optimizer) -> None:
    for group, parameter in _parameters(inner):
        if group["dampening"] and group["momentum"]:
            raise ConfigError("SGD with dampening is not known; train without --inmem-snapshot")
        if group["momentum"] and inner.state[parameter].get("momentum_buffer") is None:
            # The first step sets it to the gradient.  Minus zero plus x is x for every x,
            # zeros of both signs included; plus zero would lose the sign of some.
            buffer = torch.full_like(parameter, -0.0)
            inner.state[parameter]["momentum_buffer"] = buffer


def _check_known(inner: Any) -> None:
    if getattr(inner, APEX_MASTERS, None):
        raise ConfigError(
            f"{_name(inner)} was made with master weights of its own, which are outside its "
            "state; let Megatron keep them (master_weights=False)"
        )
    for _, parameter in _parameters(inner):
        for name, value in inner.state[parameter].items():
            plain = isinstance(value, torch.Tensor | int | float | None)
            if name not in KNOWN_STATE or not plain:
                raise ConfigError(
                    f"{_name(inner)} keeps {name!r} ({type(value).__name__}) for each parameter, "
                    f"which is not known; known are {', '.join(sorted(KNOWN_STATE))}. Use a "
                    "release of it that keeps only these, or train without --inmem-snapshot"
                )


def state_tensors(inner: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that the optimizer keeps for one of its parameters, scales included."""
    state = inner.state[parameter]
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    scales = getattr(inner, SCALES, {}).get(parameter, {})
    found |= {f"{name}.scale": value for name, value in scales.items()}
    return found


def state_numbers(inner: Any) -> list[dict[str, Any]]:
    """What the optimizer keeps beside tensors, by parameter in order; mostly nothing."""
    return [
        {name: v for name, v in inner.state[p].items() if not isinstance(v, torch.Tensor)}
        for _, p in _parameters(inner)
    ]


def load_state_numbers(inner: Any, numbers: list[dict[str, Any]]) -> None:
    """Set what :func:`state_numbers` gave."""
    for (_, parameter), values in zip(_parameters(inner), numbers, strict=True):
        inner.state[parameter].update(values)


def load_group(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Set rates and other values of a parameter group.

    Tensors that are there are filled in place; others are put where the parameters are: a
    capturable optimizer makes its ``step`` only in its first step.
    """
    for name, value in values.items():
        present = group.get(name)
        if not isinstance(value, torch.Tensor):
            group[name] = value
        elif isinstance(present, torch.Tensor):
            present.copy_(value)
        else:
            group[name] = value.to(group["params"][0].device) if group["params"] else value
