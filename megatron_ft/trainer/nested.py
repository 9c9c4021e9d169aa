"""Tensors in nested mappings, lists and tuples, and the objects that a state mapping may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import PLAIN
from megatron_ft.trainer.addresses import DENSE


def is_stateful(value: Any) -> bool:
    """True for the Stateful protocol of torch.distributed.checkpoint."""
    if type(value) in DENSE:
        return False
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_optimizer(value: Any) -> bool:
    """True for torch's optimizers and wrappers that look like one."""
    return is_stateful(value) and hasattr(value, "param_groups") and hasattr(value, "step")


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their places below ``path``; two may have one name."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from tensors_in(f"{path}/{key}", inner)


def named_tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """As ``tensors_in``, of thousands, each under a name of its own.

    ConfigError for two of one name, and for an object inside that has a state_dict.
    """
    names, tensors = list[str](), list[torch.Tensor]()
    pending: list[tuple[str, Any]] = [("", {name: value})]
    while pending:
        path, container = pending.pop()
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, item in items:
            if isinstance(item, torch.Tensor):
                names.append(f"{path}{key}")
                tensors.append(item)
            elif isinstance(item, Mapping):
                pending.append((f"{path}{key}/", item))
            elif isinstance(item, list | tuple):
                if not PLAIN.issuperset(map(type, item)):
                    pending.append((f"{path}{key}/", item))
            elif type(item) not in PLAIN and is_stateful(item):
                raise ConfigError(
                    f"{path}{key} ({type(item).__name__}) has a state_dict but lies inside another "
                    "value; put it into the state mapping under a name of its own"
                )
    found = dict(zip(names, tensors, strict=True))
    if len(found) < len(names):
        raise same_name(next(one for n, one in enumerate(names) if one in names[:n]))
    return found


def same_name(name: str) -> ConfigError:
    return ConfigError(f"two tensors of the state are called {name!r}; rename one of them")
