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
            else f"register_optimizer({_name(cls)}): create is no function"
        )
    _known[cls] = OptimizerClass(create, dict(state))


def optimizer_class(inner: Any) -> OptimizerClass:
    """The registered class of an optimizer; ConfigError that names one that is not."""
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


def _moments(*names: str, **optional: str) -> StateMaker:
    """The ``step`` and zeros as the parameter; those of ``optional`` if the group's key is set."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        wanted = [*names, *(name for name, key in optional.items() if group[key])]
        zeros = {name: torch.zeros_like(parameter).detach() for name in wanted}
        return {"step": _number(0.0, group, parameter), **zeros}

    return make


def _sgd(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if group["dampening"] and group["momentum"]:
        raise ConfigError("SGD with dampening is not known; train without snapshots")
    if not group["momentum"]:
        return {}
    # The first step sets it to the gradient.  Minus zero plus x is x for every x, zeros of
    # both signs included; plus zero would lose the sign of some.
    return {"momentum_buffer": torch.full_like(parameter, -0.0)}


def _muon(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {"momentum_buffer": torch.zeros_like(parameter).detach()}


def _adagrad(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    begins_at = group["initial_accumulator_value"]
    return {"step": torch.zeros(()), "sum": torch.full_like(parameter, begins_at).detach()}


def _asgd(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    there = {**group, "capturable": True}
    values = {"step": 0.0, "eta": float(group["lr"]), "mu": 1.0}
    numbers = {name: _number(value, there, parameter) for name, value in values.items()}
    return {**numbers, "ax": torch.zeros_like(parameter).detach()}


def _nadam(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    moments = _moments("exp_avg", "exp_avg_sq")(inner, group, parameter)
    return {**moments, "mu_product": _number(1.0, group, parameter)}


def _rprop(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    sizes = torch.full_like(parameter, float(group["lr"])).detach()
    return {**_moments("prev")(inner, group, parameter), "step_size": sizes}


def _lion(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {"exp_avg": torch.zeros_like(parameter).detach()}


def fused(*moments: str) -> StateMaker:
    """State of fused optimizers: ``step`` continues from the group's, if there is one."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        zeros = {name: torch.zeros_like(parameter).detach() for name in moments}
        return {"step": group.get("step", 0), **zeros}

    return make


def shared_out(elementwise: Iterable[str], *scalars: str) -> dict[str, Sharding]:
    """The ``state`` of a class that keeps such tensors and numbers."""
    return {**dict.fromkeys(elementwise, "elementwise"), **dict.fromkeys(scalars, "scalar")}


_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_RMS = ("square_avg", "momentum_buffer", "grad_avg")

_OF_TORCH: Mapping[str, tuple[StateMaker, Mapping[str, Sharding]]] = {
    "ASGD": (_asgd, shared_out(["ax"], "step", "eta", "mu")),
    "Adadelta": (
        _moments("square_avg", "acc_delta"),
        shared_out(["square_avg", "acc_delta"], "step"),
    ),
    "Adagrad": (_adagrad, shared_out(["sum"], "step")),
    "Adam": (
        _moments("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad"),
        shared_out(_ADAM, "step"),
    ),
    "Adamax": (_moments("exp_avg", "exp_inf"), shared_out(["exp_avg", "exp_inf"], "step")),
    "Muon": (_muon, shared_out(["momentum_buffer"])),
    "NAdam": (_nadam, shared_out(_ADAM[:2], "step", "mu_product")),
    "RAdam": (_moments("exp_avg", "exp_avg_sq"), shared_out(_ADAM[:2], "step")),
    "RMSprop": (
        _moments("square_avg", momentum_buffer="momentum", grad_avg="centered"),
        shared_out(_RMS, "step"),
    ),
    "Rprop": (_rprop, shared_out(["prev", "step_size"], "step")),
    "SGD": (_sgd, shared_out(["momentum_buffer"])),
}

for _kind, (_create, _state) in _OF_TORCH.items():
    # Later than the oldest torch that works: Muon.
    if hasattr(torch.optim, _kind):
        register_optimizer(getattr(torch.optim, _kind), create=_create, state=_state)
register_optimizer(torch.optim.AdamW, create=_OF_TORCH["Adam"][0], state=_OF_TORCH["Adam"][1])
register_optimizer("Lion", create=_lion, state=shared_out(["exp_avg"]))
register_optimizer(
    "FusedAdam",
    create=fused("exp_avg", "exp_avg_sq"),
    state=shared_out([*_ADAM, "master_param"], "step"),
)
