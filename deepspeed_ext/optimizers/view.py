"""DeepSpeed's optimizers as snapshots see them: masters, the weights that follow, plain values.

``OptimizerView`` is the interface; zero.py and unsharded.py implement it, one class a family of
optimizers.  This module also creates the state that an optimizer's first step would create, names
it, and keeps state shared that several masters share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.master_tensors import MasterTensors, Owned, Weight
from megatron_ft.trainer.optimizer_classes import (
    StateMaker,
    fused,
    register_optimizer,
    shared_out,
)

MASTER, _SEPARATOR = "master", "/"


class OwnedMaster(NamedTuple):
    """One tensor that an inner optimizer updates, on this rank.

    ``name`` is the same in every incarnation of the job.  ``inner.state[parameter]`` is where the
    inner optimizer keeps its moments, ``group`` its settings for it.  ``replicas`` is the
    process group whose ranks all hold the same, None if this rank's part is its own.
    """

    name: str
    inner: Any
    group: dict[str, Any]
    parameter: torch.Tensor
    replicas: Any = None

    @property
    def tensor(self) -> torch.Tensor:
        """The master in the memory that it has now: DeepSpeed's offload_states gives it other."""
        return self.parameter.detach()


class OptimizerView(ABC):
    """One engine's optimizer, read when training begins and after a restore, not in between."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._wrapper = engine.optimizer

    @property
    def inner(self) -> Any:
        """The optimizer of torch's kind that updates the masters: the one to fence."""
        return self._wrapper.optimizer

    @abstractmethod
    def masters(self) -> Sequence[OwnedMaster]:
        """All tensors that ``inner`` updates, in an order that is the same in every incarnation."""

    def counted_as(self, master: OwnedMaster) -> str:
        """The name of a master's numbers, such as steps, under which all ranks have the same."""
        return master.name

    @abstractmethod
    def weights(self) -> Sequence[Weight]:
        """The weights that follow from masters of this rank; none where these are the weights."""

    def derived(self) -> Iterable[torch.Tensor]:
        """Memory that ``publish`` fills: all weights of the model that follow from masters."""
        return [weight.tensor for weight in self.weights()]

    def adopt(self, name: str, stored: torch.Tensor) -> bool:
        """Take a stored tensor that the optimizer lacks; False if it cannot be one of its own."""
        return False

    def replica_group(self, name: str) -> Any:
        """The group of a tensor that ``adopt`` would take, or None."""
        return None

    @abstractmethod
    def owned(self) -> Iterable[torch.Tensor]:
        """The model's parameters that follow from masters of any rank."""

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Make the model's weights equal to the masters: collective over the ranks that share.

        A weight whose name is in ``kept`` becomes that instead.
        """
        with torch.no_grad():
            for weight in self.weights():
                weight.tensor.copy_(kept.get(weight.name, weight.master))

    def before_training(self) -> Any:
        """Install what must watch gradients, before the first one; returns it, or None."""
        return None

    def scaler(self) -> Any:
        return getattr(self._wrapper, "loss_scaler", None)

    def scalars(self) -> dict[str, Any]:
        """Loss scale, overflow, clipping: the plain values on which later steps depend."""
        scaler, autocast = self.scaler(), getattr(self._wrapper, _AUTOCAST_SCALER, None)
        return {
            "wrapper": plain_fields(self._wrapper, WRAPPER_FIELDS),
            "scaler": {} if scaler is None else plain_fields(scaler),
            "autocast_scaler": None if autocast is None else autocast.state_dict(),
        }

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        scaler, autocast = self.scaler(), getattr(self._wrapper, _AUTOCAST_SCALER, None)
        set_fields(self._wrapper, scalars["wrapper"])
        if scaler is not None:
            set_fields(scaler, scalars["scaler"])
        if autocast is not None and scalars["autocast_scaler"] is not None:
            autocast.load_state_dict(scalars["autocast_scaler"])


PLAIN = bool | int | float | str | torch.dtype | None

WRAPPER_FIELDS = ("overflow", "clip_grad", "custom_loss_scaler", "external_loss_scale")
"""Attributes that wrappers have if they have the feature.  The user's limit on gradients is one
because DeepSpeed's own checkpoints of ZeRO-1 and 2 bring it back."""

_AUTOCAST_SCALER = "torch_autocast_gradscaler"


def plain_fields(holder: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of ``holder`` that are plain values; only those of ``names`` if given."""
    found = vars(holder)
    chosen = found if names is None else [name for name in names if name in found]
    return {name: found[name] for name in chosen if isinstance(found[name], PLAIN)}


def set_fields(holder: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        setattr(holder, name, value)


def group_names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """A name for each group of an optimizer, in order.

    Groups of experts are numbered by what DeepSpeed calls them (``ep_size_4``), because it
    makes them in the order of a set of strings, which every process has in an order of its
    own; all others by their number.
    """
    seen: Counter[str] = Counter()
    names = []
    for group in groups:
        family = f"{group['name']}." if group.get("moe") else ""
        names.append(f"{family}{seen[family]}")
        seen[family] += 1
    return names


def group_scalars(inner: Any) -> dict[str, dict[str, Any]]:
    """Everything in an optimizer's parameter groups but the parameters, by the group's name."""
    names = group_names(inner.param_groups)
    return dict(zip(names, master_tensors.group_scalars(inner), strict=True))


def load_group_scalars(inner: Any, scalars: Mapping[str, dict[str, Any]]) -> None:
    names = group_names(inner.param_groups)
    if set(names) != set(scalars):
        raise LayoutMismatchError(
            f"the optimizer has parameter groups {sorted(names)}, the snapshot "
            f"{sorted(scalars)}; build the same optimizer as in the run that saved it"
        )
    master_tensors.load_group_scalars(inner, [scalars[name] for name in names])


State = tuple[dict[str, Any], str]
"""The state of one master, and the name of a tensor in it."""


def shared_states(masters: Iterable[OwnedMaster]) -> dict[str, str]:
    """Names of state tensors that are the tensor of an earlier master, with that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, (state, key) in _states(masters).items():
        owner = first.setdefault(id(state[key]), name)
        if owner != name:
            shared[name] = owner
    return shared


def share_states(masters: Iterable[OwnedMaster], shared: Mapping[str, str]) -> None:
    """Make states share tensors as :func:`shared_states` gave."""
    states = _states(masters)
    for name, owner in shared.items():
        (state, key), (owning, owned) = states[name], states[owner]
        state[key] = owning[owned]


def _states(masters: Iterable[OwnedMaster]) -> dict[str, State]:
    return {
        f"{master.name}/{key}": (state, key)
        for master in masters
        for state in [master.inner.state[master.parameter]]
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def tensors_of(masters: Iterable[OwnedMaster]) -> MasterTensors:
    """Masters and what is kept for them, by name; read when they are asked for."""
    owned = (Owned(master.name, master.inner, master.parameter) for master in masters)
    return MasterTensors(owned, _SEPARATOR, MASTER)


def names_of(master: OwnedMaster) -> list[str]:
    kept = master_tensors.state_tensors(master.inner, master.parameter)
    return [f"{master.name}{_SEPARATOR}{name}" for name in (MASTER, *kept)]


def _on_host(*moments: str) -> StateMaker:
    """State of the optimizers for offloaded states: fp32 by default, ``step`` a Python int."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        full = getattr(inner, "fp32_optimizer_states", True)
        dtype = torch.float32 if full else parameter.dtype
        zeros = {name: torch.zeros_like(parameter, dtype=dtype).detach() for name in moments}
        return {"step": 0, **zeros}

    return make


def _register(name: str, maker: Callable[..., StateMaker], *moments: str) -> None:
    register_optimizer(name, create=maker(*moments), state=shared_out(moments, "step"))


_register("DeepSpeedCPUAdagrad", _on_host, "exp_avg_sq")
_register("DeepSpeedCPUAdam", _on_host, "exp_avg", "exp_avg_sq")
_register("DeepSpeedCPULion", _on_host, "exp_avg", "exp_avg_sq")
_register("FusedLion", fused, "exp_avg")
