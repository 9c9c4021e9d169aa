"""The tensors that inner optimizers own: masters, and what is kept for each of them.

An inner optimizer is the one inside a framework's wrappers.  Its class says what it keeps, see
optimizer_classes.py.  FusedAdam of Transformer Engine also keeps scales of its fp8 moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.addresses import DENSE
from megatron_ft.trainer.optimizer_classes import check_state, optimizer_class
from megatron_ft.trainer.state import host_copy
from megatron_ft.trainer.tensor_table import Members

SCALES = "_scales"
"""Attribute of Transformer Engine's FusedAdam: by parameter, the scales of its fp8 moments."""

APEX_MASTERS = "param_groups_master"
"""Attribute in which Apex's FusedAdam keeps masters of its own, outside its state."""

SCALE = ".scale"
"""Ends the names under which those scales are captured."""


def parameters(inner: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def create_state(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Create the state of one parameter as the first step would, if it is still empty.

    Raises ConfigError for an optimizer whose class is not registered, or keeps something unknown.
    """
    known, state = optimizer_class(inner), inner.state[parameter]
    if all(value is None for value in state.values()):
        state.update(known.create(inner, group, parameter))
    if getattr(inner, APEX_MASTERS, None):
        raise ConfigError(
            f"{type(inner).__module__}.{type(inner).__qualname__} was made with master weights of "
            "its own, which are outside its state; let the framework keep them "
            "(master_weights=False)"
        )
    check_state(inner, state)


def create_missing(inner: Any) -> None:
    for group, parameter in parameters(inner):
        if parameter.requires_grad and not inner.state.get(parameter):
            create_state(inner, group, parameter)


def state_tensors(inner: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that the optimizer keeps for one of its parameters, scales included."""
    kept = inner.state[parameter].items()
    found = {name: value for name, value in kept if isinstance(value, torch.Tensor)}
    if scales := getattr(inner, SCALES, None):
        found |= {f"{name}{SCALE}": value for name, value in scales.get(parameter, {}).items()}
    return found


def state_numbers(inner: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """Values other than tensors that the optimizer keeps for one parameter; mostly none."""
    state = inner.state[parameter]
    return {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def group_scalars(inner: Any) -> list[dict[str, Any]]:
    """Everything in the parameter groups but the parameters: rates, decay, FusedAdam's step."""
    return [
        {name: host_copy(value) for name, value in group.items() if name != "params"}
        for group in inner.param_groups
    ]


def load_group_scalars(inner: Any, scalars: list[dict[str, Any]]) -> None:
    for group, values in zip(inner.param_groups, scalars, strict=True):
        _load_group(group, values)


def _load_group(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Fill one group; tensors that are not there yet are put where the parameters are.

    A capturable optimizer makes its ``step`` only in its first step.
    """
    for name, value in values.items():
        present = group.get(name)
        if not isinstance(value, torch.Tensor):
            group[name] = value
        elif isinstance(present, torch.Tensor):
            present.copy_(value)
        else:
            group[name] = value.to(group["params"][0].device) if group["params"] else value


class Owned(NamedTuple):
    """One tensor that ``inner`` updates, under the name that begins all names of it."""

    name: str
    inner: Any
    parameter: torch.Tensor


class Weight(NamedTuple):
    """A low-precision weight that is ``master`` rounded, after each step that was not skipped.

    ``replicas`` is the process group whose ranks all hold the same, None if it is this rank's own.
    """

    name: str
    tensor: torch.Tensor
    master: torch.Tensor
    replicas: Any = None


class MasterTensors:
    """Tensors to capture by name: each master as ``{name}{separator}{own}``, and what its inner
    optimizer keeps for it as ``{name}{separator}{kept}``, scales included.
    """

    def __init__(self, masters: Iterable[Owned], separator: str, own: str) -> None:
        self._masters, self._separator, self._own = list(masters), separator, own
        self._parameters = [master.parameter for master in self._masters]
        self._inners = list({id(master.inner): master.inner for master in self._masters}.values())
        self._numbered: list[Owned] | None = None
        self._keys: list[Any] = []
        self._names: list[str] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as of now.

        Plain tensors and parameters are given as they are, so that it shows where they lie.
        """
        kept = [inner.state[parameter] for _, inner, parameter in self._masters]
        scaled = any(getattr(inner, SCALES, None) for inner in self._inners)
        members = None if scaled else Members.of(kept)
        values = [] if members is None else [*self._parameters, *members.values]
        if members is None or not {*map(type, values)} <= DENSE:
            return self._tensors_one_by_one()
        self._numbered = []
        # Thousands of names: made anew only when keys are others than last time.
        if members.keys != self._keys:
            begins = [f"{master.name}{self._separator}" for master in self._masters]
            pairs = zip(begins, kept, strict=True)
            self._names = [f"{begin}{self._own}" for begin in begins]
            self._names += [f"{begin}{key}" for begin, state in pairs for key in state]
            self._keys = members.keys
        return dict(zip(self._names, values, strict=True))

    def _tensors_one_by_one(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        numbered = []
        for master in self._masters:
            name, inner, parameter = master
            kept, begin = inner.state[parameter], f"{name}{self._separator}"
            found[f"{begin}{self._own}"] = as_captured(parameter)
            tensors = {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
            for key, value in tensors.items():
                found[f"{begin}{key}"] = as_captured(value)
            if len(tensors) < len(kept):
                numbered.append(master)
            if scales := getattr(inner, SCALES, None):
                for key, value in scales.get(parameter, {}).items():
                    found[f"{begin}{key}{SCALE}"] = as_captured(value)
        self._numbered = numbered
        return found

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Values other than tensors that are kept, by the master's name, where there are any.

        As of now; which ones these are was seen by the last ``tensors()``.
        """
        if self._numbered is None:
            self.tensors()
        numbered = self._numbered or []
        return {name: state_numbers(inner, parameter) for name, inner, parameter in numbered}


def as_captured(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is a plain one or a parameter; of any other kind, its data."""
    return tensor if type(tensor) in DENSE else tensor.detach()
