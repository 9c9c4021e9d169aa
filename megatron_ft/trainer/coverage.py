"""Coverage by address: tensors that train lie in memory that snapshots hold and restores fill.

A name or a ``state_dict`` proves nothing: both may stand for a copy.  So what modules and
optimizers hold themselves is compared with what is captured, by address, dtype and shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.addresses import DENSE, local_tensor
from megatron_ft.trainer.nested import tensors_in
from megatron_ft.trainer.tensor_table import versions

Named = tuple[str, torch.Tensor]


Place = tuple[int, torch.dtype, torch.Size]
"""Address and form of a tensor's elements; of a DTensor, of its shard on this rank."""

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")


def places(tensors: Iterable[torch.Tensor]) -> list[Place]:
    """The place of each, found in calls that loop in C: there are thousands.

    A tensor without plain memory is in a place of its own.
    """
    every = list(tensors)
    local = every if {*map(type, every)} <= DENSE else list(map(local_tensor, every))
    if {*map(type, local)} <= DENSE and {*map(_LAYOUT, local)} <= {torch.strided}:
        addresses, shapes = map(torch.Tensor.data_ptr, local), map(torch.Tensor.size, local)
        return list(zip(addresses, map(_DTYPE, local), shapes, strict=True))
    return [(_address(one), one.dtype, _shape(one)) for one in local]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse, fake or not initialized
        return id(tensor)


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size() if is_lazy(tensor) else tensor.shape


def require_covered(
    held: Iterable[Named], captured: Iterable[torch.Tensor], left_out: Iterable[str]
) -> None:
    """ConfigError that names the first tensor of ``held`` that lies in no ``captured`` memory.

    Names that match a pattern of ``left_out`` are not checked.
    """
    named, known, patterns = list(held), set(places(captured)), tuple(left_out)
    found = zip(named, places(tensor for _, tensor in named), strict=True)
    missing = [
        name
        for (name, tensor), place in found
        if place not in known and not is_empty(tensor) and not matches(name, patterns)
    ]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors that train are in no memory that a snapshot captures, "
            f"{missing[0]} first: put the module or tensor that holds it into the state mapping "
            "itself (the state_dict() of its object gives other memory), or name it in leave_out"
        )


def is_empty(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.numel()


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def held_by_module(name: str, module: torch.nn.Module) -> Iterator[Named]:
    for found in (module.named_parameters(), module.named_buffers()):
        yield from ((f"{name}/{key}", tensor) for key, tensor in found)


def held_by_optimizer(name: str, optimizer: Any) -> Iterator[Named]:
    """Tensors of its state, tensors among its rates, and the parameters that it changes."""
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        yield from tensors_in(f"{name}/param_groups/{number}", group)
    numbers = numbers_of(optimizer)
    kept = getattr(optimizer, "state", None)
    for key, value in kept.items() if isinstance(kept, Mapping) else ():
        yield from tensors_in(f"{name}/state/{numbers.get(id(key), key)}", value)


def numbers_of(optimizer: Any) -> dict[int, int]:
    """The number of each parameter in its ``state_dict``, by ``id``."""
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    numbers: dict[int, int] = {}
    for parameter in every:
        numbers.setdefault(id(parameter), len(numbers))
    return numbers


class Written:
    """Tensors as they were when their bytes were loaded: what is written over later shows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # The tensors are kept: freed memory would be given out again.
        self._tensors, self._facts = tensors, _written(tensors.values())

    def lost(self, now: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of those that lie elsewhere now, or were written to since."""
        before = dict(zip(self._tensors, self._facts, strict=True))
        left = {name: now[name] for name in before if name in now and not is_empty(now[name])}
        after = zip(left, _written(left.values()), strict=True)
        return {name for name, facts in after if facts != before[name]}


def _written(tensors: Iterable[torch.Tensor]) -> list[tuple[Place, int]]:
    every = list(tensors)
    return list(zip(places(every), versions(list(map(local_tensor, every))), strict=True))
