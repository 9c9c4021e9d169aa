"""Classes of optimizers: how the state of one parameter begins, and how ranks share it out.

Needed where state has to exist before the first step, or in another layout: with DeepSpeed and
Megatron, for exports and reshapes.  Snapshots of a loop of one's own need none of it.

Classes of packages that may not be installed are registered by their name.  FusedAdam is that of
DeepSpeed; Megatron itself makes the state of the two others of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch

from megatron_ft.core.errors import ConfigError

Sharding = Literal["elementwise", "scalar", "replicated", "local"]

StateMaker = Callable[[Any, dict[str, Any], torch.Tensor], dict[str, Any]]
"""Makes what the first step of (optimizer, in this group, for this parameter) would begin with."""


class OptimizerClass(NamedTuple):
    """One registered class."""

    create: StateMaker
    state: Mapping[str, Sharding]


_known: dict[type | str, OptimizerClass] = {}


def register_optimizer(
    cls: type | str, *, create: StateMaker, state: Mapping[str, Sharding]
) -> None:
    """Let DeepSpeed, Megatron, exports and reshapes know an optimizer: a class, or its name.

    ``create(optimizer, group, parameter)`` gives a dict of what the optimizer keeps for one
    parameter before its first step: ``parameter`` may be a flat part of the model's.  ``state`` has
    each name that can be in it, with the way in which ranks share it out:

    - ``"elementwise"``: a tensor laid out as the parameter, split as that is,
    - ``"scalar"``: one number for the whole parameter, the same on all ranks,
    - ``"replicated"``: a tensor that is equal on all ranks that hold a part of the parameter,
    - ``"local"``: a rank's own; a reshape of it is refused.

    Call it before training.  Subclasses count as ``cls``.  A later call replaces an earlier one.
    """
    strange = sorted({str(way) for way in state.values()} - {*get_args(Sharding)})
    if strange or not callable(create):
        raise ConfigError(
            f"register_optimizer({_name(cls)}): state gives {', '.join(strange)}, of which only "
            f"{', '.join(get_args(Sharding))} are known"
            if strange
            else f"register_optimizer({_name(cls)}): create is not a function"
        )
    _known[cls] = OptimizerClass(create, dict(state))


def optimizer_class(inner: Any) -> OptimizerClass:
    for cls in type(inner).__mro__:
        found = _known.get(cls) or _known.get(cls.__name__)
        if found is not None:
            return found
    raise ConfigError(
        f"the optimizer {_name(type(inner))} is not known, and its state has to be made before its "
        f"first step: {_advice(inner)}, or train without snapshots"
    )


def check_state(inner: Any, state: Mapping[str, Any]) -> None:
    """ConfigError if the optimizer keeps something for a parameter that is not registered."""
    known = optimizer_class(inner).state
    for name, value in state.items():
        if name not in known or not isinstance(value, torch.Tensor | int | float | None):
            raise ConfigError(
                f"{_name(type(inner))} keeps {name!r} ({type(value).__name__}) for each parameter, "
                f"which is not known; known are {', '.join(sorted(known)) or 'none'}. Use a "
                f"release of it that keeps only tensors and numbers of these names, or "
                f"{_advice(inner)}, or train without snapshots"
            )


def sharding_of(inner: Any, name: str) -> Sharding:
    """The way that ranks share out the state of that name; each has its own of an unknown one."""
    return optimizer_class(inner).state.get(name, "local")


def _advice(inner: Any) -> str:
    return f"call megatron_ft.register_optimizer({type(inner).__name__}, create=..., state=...)"


def _name(cls: type | str) -> str:
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


def _number(value: float, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """A number as torch's optimizers keep it: on the host, where no device has to count."""
    fused = bool(group.get("fused"))
    device = parameter.device if fused or group.get("capturable") else torch.device("cpu")
    wide = torch.get_default_dtype() == torch.float64 and not fused
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32, device=device)


Group = dict[str, Any]
Begin = float | Callable[[Group], float | None]
"""The value that state begins with, whatever the settings or by those; None if it is not kept."""


def _made(tensors: Mapping[str, Begin], numbers: Mapping[str, Begin], more: Group) -> StateMaker:
    def make(inner: Any, group: Group, parameter: torch.Tensor) -> dict[str, Any]:
        def begun(values: Mapping[str, Begin]) -> dict[str, float]:
            found = {name: v(group) if callable(v) else v for name, v in values.items()}
            return {name: value for name, value in found.items() if value is not None}

        wide = {**group, **more}
        counts = {name: _number(v, wide, parameter) for name, v in begun(numbers).items()}
        filled = {n: torch.full_like(parameter, v).detach() for n, v in begun(tensors).items()}
        return {**counts, **filled}

    return make


def _if(key: str) -> Begin:
    return lambda group: 0.0 if group[key] else None


def _rate(group: Group) -> float:
    return float(group["lr"])


def _momentum(group: Group) -> float | None:
    if group["dampening"] and group["momentum"]:
        raise ConfigError("SGD with dampening is not known; train without snapshots")
    # The first step sets it to the gradient.  Minus zero plus x is x for every x, zeros of
    # both signs included; plus zero would lose the sign of some.
    return -0.0 if group["momentum"] else None


def fused(*moments: str) -> StateMaker:
    """State of fused optimizers: ``step`` continues from the group's, if there is one."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        zeros = {name: torch.zeros_like(parameter).detach() for name in moments}
        return {"step": group.get("step", 0), **zeros}

    return make


def shared_out(elementwise: Iterable[str], *scalars: str) -> dict[str, Sharding]:
    """The ``state`` of a class that keeps such tensors and numbers."""
    return {**dict.fromkeys(elementwise, "elementwise"), **dict.fromkeys(scalars, "scalar")}


_STEP: dict[str, Begin] = {"step": 0.0}
_ADAM: dict[str, Begin] = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
_KEPT: Mapping[str, tuple[Mapping[str, Begin], Mapping[str, Begin]]] = {
    "ASGD": ({"ax": 0.0}, {**_STEP, "eta": _rate, "mu": 1.0}),
    "Adadelta": ({"square_avg": 0.0, "acc_delta": 0.0}, _STEP),
    "Adagrad": ({"sum": lambda group: float(group["initial_accumulator_value"])}, _STEP),
    "Adam": ({**_ADAM, "max_exp_avg_sq": _if("amsgrad")}, _STEP),
    "AdamW": ({**_ADAM, "max_exp_avg_sq": _if("amsgrad")}, _STEP),
    "Adamax": ({"exp_avg": 0.0, "exp_inf": 0.0}, _STEP),
    "Lion": ({"exp_avg": 0.0}, {}),
    "Muon": ({"momentum_buffer": 0.0}, {}),
    "NAdam": (_ADAM, {**_STEP, "mu_product": 1.0}),
    "RAdam": (_ADAM, _STEP),
    "RMSprop": (
        {"square_avg": 0.0, "momentum_buffer": _if("momentum"), "grad_avg": _if("centered")},
        _STEP,
    ),
    "Rprop": ({"prev": 0.0, "step_size": _rate}, _STEP),
    "SGD": ({"momentum_buffer": _momentum}, {}),
}
"""Tensors as the parameter, and numbers, by the name of a class; of torch's where it has one."""

for _kind, (_tensors, _numbers) in _KEPT.items():
    # ASGD keeps its numbers on the parameter's device.
    _create = _made(_tensors, _numbers, {"capturable": True} if _kind == "ASGD" else {})
    # Later than the oldest torch that works: Muon.
    if (_cls := getattr(torch.optim, _kind, "Lion" if _kind == "Lion" else None)) is not None:
        register_optimizer(_cls, create=_create, state=shared_out(_tensors, *_numbers))
register_optimizer(
    "FusedAdam",
    create=fused(*_ADAM),
    state=shared_out([*_ADAM, "max_exp_avg_sq", "master_param"], "step"),
)
