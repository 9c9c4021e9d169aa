"""One pass over a state mapping: which tensors it holds, by name, and what lies beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import PLAIN
from megatron_ft.trainer.addresses import DENSE, local_tensor
from megatron_ft.trainer.module_state import ModuleState
from megatron_ft.trainer.optimizer_load import optimizer_content

SMALL_BYTES = 16384
"""Tensors of unknown Stateful objects up to this size travel with the small objects: a
data loader's may change their shape, which no planned layout could hold."""

COUNTER_BYTES = 4096
"""Plain tensors up to this size are secured at the boundary: likely counters."""

_KIND, _LENGTH = attrgetter("layout", "is_nested"), attrgetter("nbytes")
_STRIDED = {(torch.strided, False)}


@dataclass
class Enumeration:
    """One pass over a state mapping.

    ``structures`` holds, per name of the mapping, what has to be encoded beside the
    tensors; ``name_of`` says by ``id`` which tensor inside them is stored under which
    name; ``handles`` gives the user's own object (a DTensor, not its local shard), and
    ``all_plain`` says that they are no subclasses; ``inlined`` are small tensors that are encoded
    with their structure.
    """

    lazy: dict[str, torch.Tensor] = field(default_factory=dict)
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, torch.Tensor] = field(default_factory=dict)
    inlined: list[torch.Tensor] = field(default_factory=list)
    all_plain: bool = True

    @cached_property
    def name_of(self) -> dict[int, str]:
        """The name of each tensor by its ``id``, of several the first; of a finished pass."""
        names, tensors = reversed(self.handles.keys()), reversed(self.handles.values())
        return dict(zip(map(id, tensors), names, strict=True))

    @cached_property
    def wrapped(self) -> dict[str, torch.Tensor]:
        """The tensors whose insides are stored, by name; of a finished pass."""
        if self.all_plain:
            return {}
        return {n: one for n, one in self.handles.items() if local_tensor(one) is not one}

    def put(self, name: str, tensor: torch.Tensor, lazy: bool) -> None:
        """Register a tensor under a name that must be new."""
        if name in self.handles:
            raise ConfigError(f"two tensors of the state are called {name!r}; rename one of them")
        self.handles[name] = tensor
        self.all_plain &= type(tensor) in DENSE
        (self.lazy if lazy else self.boundary)[name] = local_tensor(tensor)

    def put_all(self, names: list[str], tensors: list[torch.Tensor], lazy: bool) -> None:
        """As ``put`` of each, in few calls: there may be thousands."""
        if not self.handles.keys().isdisjoint(names) or len({*names}) < len(names):
            for name, tensor in zip(names, tensors, strict=True):
                self.put(name, tensor, lazy)
        self.handles.update(zip(names, tensors, strict=True))
        plain = {*map(type, tensors)} <= DENSE
        self.all_plain &= plain
        local = tensors if plain else map(local_tensor, tensors)
        (self.lazy if lazy else self.boundary).update(zip(names, local, strict=True))

    def put_plain(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        """Register tensors of a mapping that holds nothing else, as ``enumerate_entry`` would."""
        if {*map(_KIND, tensors)} <= _STRIDED:
            long = list(map(COUNTER_BYTES.__lt__, map(_LENGTH, tensors)))
        else:
            long = [_is_longer(tensor, COUNTER_BYTES) for tensor in tensors]
        for lazy in (True, False):
            chosen = [is_long is lazy for is_long in long]
            self.put_all(list(compress(names, chosen)), list(compress(tensors, chosen)), lazy)


def is_stateful(value: Any) -> bool:
    """True for the Stateful protocol of torch.distributed.checkpoint."""
    if type(value) in DENSE:
        return False
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_optimizer(value: Any) -> bool:
    """True for torch's optimizers and wrappers that look like one."""
    return is_stateful(value) and hasattr(value, "param_groups") and hasattr(value, "step")


def enumerate_entries(found: Enumeration, entries: Mapping[str, Any]) -> None:
    """Enumerate the entries of a state mapping; modules come as their ModuleState."""
    tensors = list(entries.values())
    if {*map(type, tensors)} <= DENSE:
        return found.put_plain(list(entries), tensors)
    for name, value in entries.items():
        enumerate_entry(found, name, value)


def enumerate_entry(found: Enumeration, name: str, value: Any) -> None:
    """Enumerate one entry of a state mapping.

    Lazily copied: parameters of modules, everything of optimizers, plain tensors that
    are no counters.  At the boundary: buffers, and whatever else has a state_dict.
    """
    if isinstance(value, ModuleState):
        _module(found, name, value)
    elif isinstance(value, torch.Tensor):
        found.put(name, value, _is_longer(value, COUNTER_BYTES))
    elif is_optimizer(value):
        enumerate_structure(found, name, optimizer_content(value), True)
    elif is_stateful(value):
        enumerate_structure(found, name, value.state_dict(), False, inline=SMALL_BYTES)
    else:
        enumerate_structure(found, name, value, None)


def _is_longer(tensor: torch.Tensor, length: int) -> bool:
    """True if the tensor has more bytes, or is not dense, which a plan refuses."""
    if is_lazy(tensor):
        return True
    return tensor.layout != torch.strided or tensor.is_nested or tensor.nbytes > length


def _module(found: Enumeration, name: str, module: ModuleState) -> None:
    """Enumerate a module; a structure is kept only of what is none of its own tensors."""
    module.refresh()
    found.put_all(list(module.parameters), list(module.parameters.values()), True)
    found.put_all(list(module.buffers), list(module.buffers.values()), False)
    if module.more:
        extra, rest = module.split_more()
        enumerate_structure(found, name, rest, False)
        enumerate_structure(found, name, extra, False, inline=SMALL_BYTES)
        found.structures[name] = module.more


def enumerate_structure(
    found: Enumeration, name: str, value: Any, lazy: bool | None, inline: int = -1
) -> None:
    """Enumerate nested containers; tensors of at most ``inline`` bytes stay with it."""
    found.structures[name] = value
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
    if inline >= 0:
        # Of a DTensor only the shard can be stored.
        kept = [type(one) not in DENSE or _is_longer(one, inline) for one in tensors]
        found.inlined += [one for one, is_kept in zip(tensors, kept, strict=True) if not is_kept]
        names, tensors = list(compress(names, kept)), list(compress(tensors, kept))
    if lazy is not None:
        return found.put_all(names, tensors, lazy)
    for one, tensor in zip(names, tensors, strict=True):
        found.put(one, tensor, _is_longer(tensor, COUNTER_BYTES))
