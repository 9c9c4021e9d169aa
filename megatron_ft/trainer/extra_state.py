"""What modules keep outside parameters and buffers, through torch's own interface for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

NamedModules = Iterable[tuple[str, torch.nn.Module]]


def extra_states(modules: NamedModules) -> dict[str, Any]:
    """The extra states of ``modules`` by name; a module that has nothing to keep is left out.

    Transformer Engine's modules keep their fp8 scales and histories so.
    """
    states = {name: module.get_extra_state() for name, module in modules if has_extra_state(module)}
    return {name: state for name, state in states.items() if state is not None}


def load_extra_states(modules: NamedModules, states: dict[str, Any]) -> None:
    """Set what :func:`extra_states` gave."""
    for name, module in modules:
        if name in states and has_extra_state(module):
            module.set_extra_state(states[name])


def has_extra_state(module: torch.nn.Module) -> bool:
    """Whether its class says what else to keep of it."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state
