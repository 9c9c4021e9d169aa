"""Modules whose state_dict is torch's own, and whether it would give what it gave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import repeat
from operator import contains, itemgetter
from typing import Any, NamedTuple

import torch

from megatron_ft.trainer.enumeration import DENSE, Contents, Enumeration

_READ = (
    *("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
)
_METHODS = ("state_dict", "_save_to_state_dict")
_STOCK = {
    name: getattr(torch.nn.Module, name)
    for name in (*_METHODS, "get_extra_state", "__getattribute__")
}
_DICTS = {dict, OrderedDict}
_REMEMBERED = DENSE | {type(None)}


class StockModule:
    """A module that, with all that are below it, has torch's own state_dict and no hooks of it.

    Remembered are the objects that state_dict reads; calls that loop in C compare them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """As it is now, which is to be enumerated next."""
        self.value: object = module
        self._modules = _below(module)
        seen = _look(self._modules)
        self._seen = None if seen is None else seen.kept()

    def learn(self, found: Enumeration) -> bool:
        """Whether ``holds`` will know if what was enumerated is still so."""
        if self._seen is None or not set(self._seen.types) <= _REMEMBERED:
            return False
        # A tensor that says of itself that it is a parameter could take it back.
        return not any(hasattr(tensor, "_is_param") for tensor in found.boundary.values())

    def holds(self, found: Enumeration) -> bool:
        """Whether nothing that state_dict reads was replaced, and nothing put before it."""
        now = _look(self._modules)
        return now is not None and self._seen is not None and now.same(self._seen)


class _Look(NamedTuple):
    """All that torch's own state_dict reads of some modules, and the types of their tensors."""

    children: Contents
    tensors: Contents
    types: list[type]
    transient: tuple[Set[str], ...]

    def kept(self) -> _Look:
        """The same, of which nothing changes any more."""
        return self._replace(transient=tuple(map(frozenset, self.transient)))

    def same(self, other: _Look) -> bool:
        return (
            self.children.same(other.children)
            and self.tensors.same(other.tensors)
            and self.types == other.types
            and self.transient == other.transient
        )


def _below(root: torch.nn.Module) -> list[torch.nn.Module]:
    """It and each module below it, once; ends early at one that is none of torch's."""
    found, pending = {id(root): root}, [root]
    while pending and _is_stock(type(pending[-1])):
        for child in vars(pending.pop()).get("_modules", {}).values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                pending.append(child)
    return list(found.values())


def _look(modules: Sequence[torch.nn.Module]) -> _Look | None:
    """None unless all of them have torch's own state_dict and no hooks of it."""
    if not all(map(_is_stock, {*map(type, modules)})):
        return None
    attributes = list(map(vars, modules))
    if any(any(map(contains, attributes, repeat(method))) for method in _METHODS):
        return None
    try:
        return _read(attributes)
    except KeyError:
        # One of them has no such attribute: state_dict will say what is wrong with it.
        return None


def _read(attributes: list[dict[str, Any]]) -> _Look | None:
    columns = zip(*map(itemgetter(*_READ), attributes), strict=True)
    children, parameters, buffers, transient, *hooks = columns
    holders = parameters + buffers
    plain = {*map(type, children + holders)} <= _DICTS and {*map(type, transient)} <= {set}
    if not plain or any(map(any, hooks)):
        return None
    tensors = Contents.of(holders)
    return _Look(Contents.of(children), tensors, list(map(type, tensors.values)), transient)


def _is_stock(kind: type) -> bool:
    """Whether instances answer state_dict as torch's do, from the dicts that each of them has."""
    return (
        issubclass(kind, torch.nn.Module)
        and all(getattr(kind, name) is method for name, method in _STOCK.items())
        and not any(hasattr(kind, name) for name in _READ)
    )
