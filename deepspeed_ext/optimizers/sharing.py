"""Optimizer state that several masters share.

DeepSpeed's load of a universal checkpoint under ZeRO-3 gives all sub-groups one ``step``,
which each of them advances: steps are counted several times, and the bias corrections of
Adam with them.  A job that began so goes on so, whether it was interrupted or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.view import Master

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
