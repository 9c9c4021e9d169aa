"""Finding the tensors in a mapping of user objects, in one pass.

Whether containers still hold the very objects that they held, asked by calls that loop in C.

To enumerate a training state takes microseconds for each tensor, and holds training so long;
whether it is the one that was enumerated before can be told in a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller, not_
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import PLAIN

SMALL_BYTES = 16384
"""Tensors of unknown Stateful objects up to this size travel with the small objects: a
data loader's may change their shape, which no planned layout could hold."""

COUNTER_BYTES = 4096
"""Plain tensors up to this size are secured at the boundary: likely counters."""

DENSE = {torch.Tensor, torch.nn.Parameter}
"""Of these torch.strided says that they have plain memory; their subclasses may do otherwise."""


@dataclass
class Enumeration:
    """One pass over a state mapping.

    ``structures`` holds, per name of the mapping, what has to be encoded beside the
    tensors; ``name_of`` tells by ``id`` which tensor inside them is stored under which
    name; ``handles`` gives the user's own object (a DTensor, not its local shard).
    ``lasting`` are containers in ``structures`` that are the same while the tensors are.
    """

    lazy: dict[str, torch.Tensor] = field(default_factory=dict)
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)
    handles: dict[str, torch.Tensor] = field(default_factory=dict)
    lasting: list[Any] = field(default_factory=list)

    def put(self, name: str, tensor: torch.Tensor, lazy: bool) -> None:
        """Register a tensor under a name that must be new."""
        if name in self.handles:
            raise _called_alike(name)
        self.handles[name] = tensor
        self.name_of.setdefault(id(tensor), name)
        (self.lazy if lazy else self.boundary)[name] = local_tensor(tensor)

    def add(self, other: Enumeration) -> None:
        """All that another one found; its names must be new."""
        if not self.handles.keys().isdisjoint(other.handles):
            raise _called_alike(next(name for name in other.handles if name in self.handles))
        self.handles.update(other.handles)
        self.name_of = {**other.name_of, **self.name_of}
        self.lazy.update(other.lazy)
        self.boundary.update(other.boundary)
        self.structures.update(other.structures)
        self.lasting += other.lasting

    def same_tensors(self, other: Enumeration) -> bool:
        """Whether the other has the very same tensors, under the same names, in the same order."""
        return all(
            list(mine) == list(theirs) and all(map(is_, mine.values(), theirs.values()))
            for mine, theirs in zip(_KINDS(self), _KINDS(other), strict=True)
        )


_KINDS = attrgetter("handles", "lazy", "boundary")
_LAYOUT, _NBYTES, _IS_NESTED = map(attrgetter, ("layout", "nbytes", "is_nested"))


def _called_alike(name: str) -> ConfigError:
    return ConfigError(f"two tensors of the state are called {name!r}; rename one of them")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that lies on this rank; any other tensor as it is."""
    if type(tensor) in DENSE:
        return tensor
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor


def is_stateful(value: Any) -> bool:
    """True for the Stateful protocol of torch.distributed.checkpoint."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_optimizer(value: Any) -> bool:
    """True for torch's optimizers and wrappers that look like one."""
    return is_stateful(value) and hasattr(value, "param_groups") and hasattr(value, "step")


def enumerate_entry(found: Enumeration, name: str, value: Any, force: bool | None) -> None:
    """Enumerate one entry of a state mapping.

    Lazily copied: parameters of modules, everything of optimizers, plain tensors that
    are no counters.  At the boundary: buffers, and whatever else has a state_dict.
    ``force`` overrules that: lazily if True, at the boundary if False.
    """
    if isinstance(value, torch.Tensor):
        found.put(name, value, _plain_is_lazy(value) if force is None else force)
    elif isinstance(value, torch.nn.Module):
        _module(found, name, value, force)
    elif is_optimizer(value):
        enumerate_structure(found, name, value.state_dict(), force is not False)
    elif is_stateful(value):
        enumerate_structure(found, name, value.state_dict(), force is True, inline=SMALL_BYTES)
    else:
        enumerate_structure(found, name, value, force)


def enumerate_plain(
    names: Sequence[str], tensors: Sequence[torch.Tensor], forced: Mapping[str, bool]
) -> Enumeration:
    """As enumerate_entry of many entries that are tensors of DENSE types, in fewer calls.

    ``forced`` tells of entries by name what ``force`` is there.
    """
    handles = dict(zip(names, tensors, strict=True))
    # The first name of a tensor that has several.
    name_of = dict(zip(map(id, reversed(tensors)), reversed(names), strict=True))
    lazy = _are_lazy(tensors)
    if forced:
        lazy = list(map(forced.get, names, lazy))
    return Enumeration(
        lazy=dict(compress(handles.items(), lazy)),
        boundary=dict(compress(handles.items(), map(not_, lazy))),
        handles=handles,
        name_of=name_of,
    )


def _are_lazy(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """``_plain_is_lazy`` of each, in calls that loop in C where all are dense."""
    if {*map(_LAYOUT, tensors)} <= {torch.strided} and not any(map(_IS_NESTED, tensors)):
        return list(map(COUNTER_BYTES.__lt__, map(_NBYTES, tensors)))
    return list(map(_plain_is_lazy, tensors))


def _plain_is_lazy(tensor: torch.Tensor) -> bool:
    return _is_longer(tensor, COUNTER_BYTES)


def _is_longer(tensor: torch.Tensor, length: int) -> bool:
    """Whether it has more bytes; of what is not dense, which a plan refuses, nobody can say."""
    return tensor.layout != torch.strided or tensor.is_nested or tensor.nbytes > length


def _module(found: Enumeration, name: str, module: torch.nn.Module, force: bool | None) -> None:
    """Enumerate a module; its structure is kept only if it has extra state."""
    content = module.state_dict(keep_vars=True)
    only_tensors = True
    for key, value in content.items():
        if isinstance(value, torch.Tensor):
            is_parameter = isinstance(value, torch.nn.Parameter)
            found.put(f"{name}/{key}", value, is_parameter if force is None else force)
        else:
            only_tensors = False
    if not only_tensors:
        found.structures[name] = dict(content)


def enumerate_structure(
    found: Enumeration, name: str, value: Any, lazy: bool | None, inline: int = -1
) -> None:
    """Enumerate nested containers; tensors of at most ``inline`` bytes stay with it."""
    found.structures[name] = value
    pending = [(name, value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, torch.Tensor):
            if _is_longer(item, inline):
                found.put(path, item, _plain_is_lazy(item) if lazy is None else lazy)
        elif isinstance(item, Mapping):
            pending += [(f"{path}/{key}", inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)) and not PLAIN.issuperset(map(type, item)):
            pending += [(f"{path}/{index}", inner) for index, inner in enumerate(item)]
        elif is_stateful(item):
            raise ConfigError(
                f"{path} ({type(item).__name__}) has a state_dict but lies inside another "
                "value; put it into the state mapping under a name of its own"
            )


_VALUES = methodcaller("values")


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether both hold the very same objects, in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))


class Contents(NamedTuple):
    """What some mappings held, in order: how many entries each, under which keys, and what.

    It keeps the objects alive, so that no other one gets the identity of one of them.
    """

    lengths: list[int]
    keys: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, holders: Iterable[Mapping[Any, Any]]) -> Contents:
        """As of now."""
        lengths = list(map(len, holders := list(holders)))
        holding = list(filter(None, holders))
        values = chain.from_iterable(map(_VALUES, holding))
        return cls(lengths, list(chain.from_iterable(holding)), list(values))

    def same(self, other: Contents) -> bool:
        """Whether the other has these very objects, in the same places under equal keys."""
        return (
            self.lengths == other.lengths
            and self.keys == other.keys
            and same_objects(self.values, other.values)
        )
