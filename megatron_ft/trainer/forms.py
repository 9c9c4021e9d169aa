"""Refuses values of a state mapping that would be stored, and never reach what trains."""

from __future__ import annotations

import gc
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.coverage import is_empty, places
from megatron_ft.trainer.in_place import can_fill
from megatron_ft.trainer.uncaptured import tensors_of


def check_forms(state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """ConfigError that names one of ``values``, plain ones of ``state``, and what to give instead.

    The state dict of an optimizer is never loaded into it.  That of a module is filled in place, as
    far as it shows the module's own memory and holds tensors alone.
    """
    for name, value in values.items():
        if _is_of_optimizer(value):
            raise _form_error(name, "an optimizer")
        if _is_of_module(value) and not _shows_a_module(value):
            raise _form_error(name, "a module")
        if not isinstance(state, MutableMapping) and not can_fill(value):
            raise ConfigError(
                f"state[{name!r}] cannot be set: the state mapping is read-only and a "
                f"{type(value).__name__} cannot be filled; give a dict, or keep the value in a list"
            )


def _form_error(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"state[{name!r}] is a state_dict() of {kind}, and a load would not change the "
        f"{kind.partition(' ')[2]} itself: give that instead"
    )


def _is_of_optimizer(value: Any) -> bool:
    """True for ``{"state": {...}, "param_groups": [{"params": [0, 1, ...], ...}, ...]}``."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    is_list = isinstance(value["state"], Mapping) and isinstance(groups, list)
    return is_list and all(isinstance(one, Mapping) and "params" in one for one in groups)


def _is_of_module(value: Any) -> bool:
    """True for what torch's ``state_dict`` makes, which keeps versions of modules."""
    return isinstance(value, Mapping) and hasattr(value, "_metadata")


def _shows_a_module(content: Mapping[str, Any]) -> bool:
    tensors = [value for value in content.values() if isinstance(value, torch.Tensor)]
    if len(tensors) < len(content):
        return False
    modules = (one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module))
    members = (tensor for one in modules for tensor in tensors_of(one))
    filled = (tensor for tensor in tensors if not is_empty(tensor))
    return set(places(filled)) <= set(places(members))
