"""What every family of DeepSpeed's optimizers is seen as.

Plain values that DeepSpeed keeps as attributes of optimizers and loss scalers.

Names of parameter groups that are the same in every incarnation of the job.

Optimizer state that several masters share.

DeepSpeed's load of a universal checkpoint under ZeRO-3 gives all sub-groups one ``step``,
which each of them advances: steps are counted several times, and the bias corrections of
Adam with them.  A job that began so keeps to it, whether it was interrupted or not.

How the states of DeepSpeed's own optimizers begin.

After ``step`` of each class in deepspeed/ops (0.19.8): they create their state when it is
empty, and keep it as it is when it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.master_tensors import StateMaker


class Master(NamedTuple):
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


class Weight(NamedTuple):
    """Weights of this rank that are ``master`` rounded, after each step that was not skipped."""

    name: str
    tensor: torch.Tensor
    master: torch.Tensor
    replicas: Any = None


class OptimizerView(Protocol):
    """An engine's optimizer.  Asked when training begins and after a restore, not in between."""

    def inner(self) -> Sequence[Any]:
        """The optimizers of torch's kind that update masters: to be fenced."""

    def masters(self) -> Sequence[Master]:
        """All tensors that those update, in an order that is the same in every incarnation."""

    def weights(self) -> Sequence[Weight]:
        """The weights that follow from masters of this rank; none where these are the weights."""

    def owned(self) -> Iterable[torch.Tensor]:
        """The model's parameters that follow from masters, whichever rank has these."""

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Make the model's weights equal to the masters: collective over the ranks that share.

        A weight whose name is in ``kept`` becomes that instead.
        """

    def scalars(self) -> dict[str, Any]:
        """Loss scaler and other plain values that decide how training goes on."""

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set what ``scalars`` gave."""


def round_masters(weights: Iterable[Weight], kept: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's weights to their masters, or to what is ``kept`` of that name."""
    with torch.no_grad():
        for weight in weights:
            weight.tensor.copy_(kept.get(weight.name, weight.master))


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
    """Set what :func:`plain_fields` gave."""
    for name, value in fields.items():
        setattr(holder, name, value)


def wrapper_scalars(wrapper: Any, scaler: Any) -> dict[str, Any]:
    """Of an optimizer and of the object that holds its loss scale, None if it has none."""
    autocast = getattr(wrapper, _AUTOCAST_SCALER, None)
    return {
        "wrapper": plain_fields(wrapper, WRAPPER_FIELDS),
        "scaler": {} if scaler is None else plain_fields(scaler),
        "autocast_scaler": None if autocast is None else autocast.state_dict(),
    }


def load_wrapper_scalars(wrapper: Any, scaler: Any, scalars: Mapping[str, Any]) -> None:
    """Set what :func:`wrapper_scalars` gave, in the objects that are there."""
    set_fields(wrapper, scalars["wrapper"])
    if scaler is not None:
        set_fields(scaler, scalars["scaler"])
    autocast = getattr(wrapper, _AUTOCAST_SCALER, None)
    if autocast is not None and scalars["autocast_scaler"] is not None:
        autocast.load_state_dict(scalars["autocast_scaler"])


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
    """Set what :func:`group_scalars` gave; LayoutMismatchError if there are other groups."""
    names = group_names(inner.param_groups)
    if set(names) != set(scalars):
        raise LayoutMismatchError(
            f"the optimizer has parameter groups {sorted(names)}, the snapshot "
            f"{sorted(scalars)}; build the same optimizer as in the run that saved it"
        )
    master_tensors.load_group_scalars(inner, [scalars[name] for name in names])


State = tuple[dict[str, Any], str]
"""The state of one master, and the name of a tensor in it."""


def shared_states(masters: Iterable[Master]) -> dict[str, str]:
    """Names of state tensors that are the tensor of an earlier master, with that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, (state, key) in _states(masters).items():
        owner = first.setdefault(id(state[key]), name)
        if owner != name:
            shared[name] = owner
    return shared


def share_states(masters: Iterable[Master], shared: Mapping[str, str]) -> None:
    """Make states share tensors as :func:`shared_states` said."""
    states = _states(masters)
    for name, owner in shared.items():
        (state, key), (owning, owned) = states[name], states[owner]
        state[key] = owning[owned]


def _states(masters: Iterable[Master]) -> dict[str, State]:
    return {
        f"{master.name}/{key}": (state, key)
        for master in masters
        for state in [master.inner.state[master.parameter]]
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def materialise(master: Master) -> None:
    """Create the state of a master that is still empty; ConfigError for an unknown optimizer."""
    master_tensors.create_state(master.inner, master.group, master.parameter, MAKERS)


def _on_host(*moments: str) -> StateMaker:
    """Of the optimizers for offloaded states: fp32 by default, ``step`` a Python int."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        full = getattr(inner, "fp32_optimizer_states", True)
        dtype = torch.float32 if full else parameter.dtype
        zeros = {name: torch.zeros_like(parameter, dtype=dtype).detach() for name in moments}
        return {"step": 0, **zeros}

    return make


def _fused(*moments: str) -> StateMaker:
    """Of the fused optimizers: ``step`` continues from the group's, if a checkpoint set one."""

    def make(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        zeros = {name: torch.zeros_like(parameter).detach() for name in moments}
        return {"step": group.get("step", 0), **zeros}

    return make


MAKERS: Mapping[str, StateMaker] = {
    "DeepSpeedCPUAdam": _on_host("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPULion": _on_host("exp_avg", "exp_avg_sq"),
    "FusedAdam": _fused("exp_avg", "exp_avg_sq"),
    "FusedLion": _fused("exp_avg"),
}
"""By class name."""
