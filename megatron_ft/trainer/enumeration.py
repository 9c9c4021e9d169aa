"""One pass over a state mapping: its tensors by name, and the structures that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from megatron_ft.trainer.addresses import DENSE, local_tensor
from megatron_ft.trainer.module_state import ModuleState
from megatron_ft.trainer.nested import is_stateful, named_tensors, same_name
from megatron_ft.trainer.optimizer_content import OptimizerState
from megatron_ft.trainer.tensor_table import Members, are_all

Tensors = Mapping[str, torch.Tensor]

SMALL_BYTES = 16384
"""Tensors of unknown Stateful objects up to this size travel with the small objects: a
data loader's may change their shape, which no planned layout could hold."""

COUNTER_BYTES = 4096
"""Plain tensors up to this size are secured at the boundary: likely counters."""

_KIND, _LENGTH = attrgetter("layout", "is_nested"), attrgetter("nbytes")
_STRIDED = {(torch.strided, False)}


class NamedTensors:
    """The tensors of some tables, by name: ``lazy`` ones and those of the ``boundary``.

    ``handles`` gives the user's own object (a DTensor, not its local shard), and ``all_plain`` says
    that none is of a subclass.
    """

    def __init__(self, lazy: list[Tensors], boundary: list[Tensors]) -> None:
        """ConfigError for two tensors of one name."""
        self._tables = [*lazy, None, *boundary]
        self.handles: dict[str, torch.Tensor] = {}
        for table in (*lazy, *boundary):
            if not self.handles.keys().isdisjoint(table):
                raise same_name(min(self.handles.keys() & table.keys()))
            self.handles.update(table)
        self.all_plain = {*map(type, self.handles.values())} <= DENSE
        self.lazy, self.boundary = self._local(lazy), self._local(boundary)

    def _local(self, tables: list[Tensors]) -> dict[str, torch.Tensor]:
        found = {name: one for table in tables for name, one in table.items()}
        if self.all_plain:
            return found
        return dict(zip(found, map(local_tensor, found.values()), strict=True))

    def or_anew(self, lazy: list[Tensors], boundary: list[Tensors]) -> NamedTensors:
        """Those of the given tables: these, if they are of the very same ones.

        A DTensor may have another shard than last time.
        """
        same = self.all_plain and are_all(self._tables, [*lazy, None, *boundary])
        return self if same else NamedTensors(lazy, boundary)

    @cached_property
    def name_of(self) -> dict[int, str]:
        """The name of each tensor by its ``id``, of several the first."""
        names, tensors = reversed(self.handles.keys()), reversed(self.handles.values())
        return dict(zip(map(id, tensors), names, strict=True))

    @cached_property
    def wrapped(self) -> dict[str, torch.Tensor]:
        if self.all_plain:
            return {}
        return {n: one for n, one in self.handles.items() if local_tensor(one) is not one}


class PlainTensors:
    """The plain tensors of a state mapping, sorted anew only when one is another."""

    def __init__(self) -> None:
        self._members: Members | None = None
        self.long: Tensors = {}
        self.short: Tensors = {}

    def refresh(self, tensors: Tensors) -> PlainTensors:
        """Take these; ``short`` ones are likely counters."""
        members = Members(list(tensors), list(tensors.values()))
        if members.same(self._members):
            return self
        if {*map(type, members.values)} <= DENSE and {*map(_KIND, members.values)} <= _STRIDED:
            is_long = list(map(COUNTER_BYTES.__lt__, map(_LENGTH, members.values)))
        else:
            is_long = [_is_longer(tensor, COUNTER_BYTES) for tensor in members.values]
        self._members, self.long = members, dict(compress(tensors.items(), is_long))
        self.short = {name: one for name, one in tensors.items() if name not in self.long}
        return self


class Enumeration:
    """One pass over the entries of a state mapping, in which what is known stands for its object.

    Lazily copied: parameters of modules, everything of optimizers, plain tensors that are not
    counters.  At the boundary: buffers, and whatever else has a state_dict.  ``structures`` holds,
    per name of the mapping, what has to be encoded with the tensors, the ``inlined`` small ones
    in it.
    """

    def __init__(
        self, entries: Mapping[str, Any], plain: PlainTensors, before: NamedTensors
    ) -> None:
        """``plain`` are those of the mapping itself; what ``before`` knows is not made anew."""
        self.structures: dict[str, Any] = {}
        self.inlined: list[torch.Tensor] = []
        self._lazy, self._boundary = list[Tensors](), list[Tensors]()
        self._put(plain.long, plain.short)
        for name, value in entries.items():
            self._entry(name, value)
        self.tensors = before.or_anew(self._lazy, self._boundary)

    def _put(self, lazy: Tensors, boundary: Tensors) -> None:
        self._lazy += [lazy] if lazy else []
        self._boundary += [boundary] if boundary else []

    def _entry(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleState):
            self._module(name, value)
        elif isinstance(value, OptimizerState):
            value.refresh()
            self._put(value.tensors, {})
            self.structures[name] = value.structure
        elif is_stateful(value):
            self.structures[name] = content = value.state_dict()
            self._put({}, self._but_small(named_tensors(name, content)))
        else:
            self.structures[name] = value
            found = PlainTensors().refresh(named_tensors(name, value))
            self._put(found.long, found.short)

    def _module(self, name: str, module: ModuleState) -> None:
        """Add its own tensors; of what else its state_dict gives, the structure is kept."""
        module.refresh()
        self._put(module.parameters, module.buffers)
        if module.more:
            extra, rest = module.split_more()
            self._put({}, named_tensors(name, rest))
            self._put({}, self._but_small(named_tensors(name, extra)))
            self.structures[name] = module.more

    def _but_small(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that do not stay with their structure: of a DTensor only the shard is stored."""
        small = {
            name
            for name, one in tensors.items()
            if type(one) in DENSE and not _is_longer(one, SMALL_BYTES)
        }
        self.inlined += [tensors[name] for name in tensors if name in small]
        return {name: one for name, one in tensors.items() if name not in small}


def _is_longer(tensor: torch.Tensor, length: int) -> bool:
    """True if the tensor has more bytes, or is not dense, which a plan refuses."""
    if is_lazy(tensor):
        return True
    return tensor.layout != torch.strided or tensor.is_nested or tensor.nbytes > length
