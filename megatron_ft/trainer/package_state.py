"""Variables of a package's modules and classes, noted before a training and restored after it.

A framework keeps its groups, models and modes in many of them, and their names change with each
release.  What a module binds anew is restored, and the content of containers.  What stays is what
an import registers there, which happens once in a process: classes, functions and modules, in
variables of modules also all else that is not state of a training.  Containers that are defaults of
parameters hold what functions count, not what imports register: those are restored whole.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from inspect import getattr_static
from numbers import Number
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from megatron_ft.trainer.process_settings import refill

_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
_STATE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Number, torch.Stream, torch.Event)
_CONTAINERS = (list, dict, set, deque, tuple)


class PackageState:
    """The present values of all variables of a package's loaded modules and their classes."""

    def __init__(self, package: str) -> None:
        self._noted = [(owner, dict(_variables(owner))) for owner in _owners(package)]
        # Whether a container is a class's; None if it is a default, which is restored whole.
        self._contents: list[tuple[bool | None, Any, Any]] = []
        for owner, noted in self._noted:
            for value in noted.values():
                self._contents += [(None, one, copy.copy(one)) for one in _kept(value)]
                if type(value) in (list, set, deque) or isinstance(value, dict):
                    self._contents.append((isinstance(owner, type), value, copy.copy(value)))

    def restore(self) -> None:
        """Bind them to the same objects again, and forget what functions have cached."""
        for owner, noted in self._noted:
            for name, value in noted.items():
                if vars(owner).get(name) is not value:
                    # Some classes refuse; those have changed nothing either.
                    with suppress(AttributeError, TypeError):
                        setattr(owner, name, value)
                for function in (value, *_wrapped(value)):
                    if hasattr(function, "cache_clear") and _is_written(function, "cache_clear"):
                        function.cache_clear()
        for of_class, container, content in self._contents:
            if of_class is None:
                refill(container, content)
            else:
                _put_back(container, content, of_class)


def _put_back(container: Any, before: Any, of_class: bool) -> None:
    """Give a container its content of before again, and what an import has registered since."""
    if _identities(container) == _identities(before):
        return
    if isinstance(container, dict):
        new = {n: v for n, v in container.items() if n not in before and _stays(v, of_class)}
        refill(container, {**before, **new})
        return
    known = set(map(id, before))
    stays = [one for one in container if id(one) not in known and _stays(one, of_class)]
    if len(container) != len(before) + len(stays):
        refill(container, [*before, *stays])


def _identities(container: Any) -> list[int]:
    """Ids of its objects.  No method of theirs is called: a mock would record that."""
    values = container.values() if isinstance(container, dict) else ()
    found = [id(one) for one in (*container, *values)]
    return sorted(found) if isinstance(container, set) else found


def _stays(value: Any, of_class: bool) -> bool:
    """True for what an import has registered, as far as its class shows."""
    if isinstance(value, _CODE) or (isinstance(value, str) and not of_class):
        return True
    return not of_class and not _is_state(value)


def _is_state(value: Any) -> bool:
    """True for what a training makes: tensors, models, groups, numbers, and containers of them."""
    if isinstance(value, _CONTAINERS):
        inner = value.values() if isinstance(value, dict) else value
        return not inner or any(map(_is_state, inner))
    groups: Any = getattr(torch.distributed, "ProcessGroup", ())
    return value is None or isinstance(value, _STATE) or isinstance(value, groups)


def _is_written(owner: Any, name: str) -> bool:
    """False for an attribute that a mock, in the place of an absent package, makes up.

    It would keep a record of each call.
    """
    return getattr_static(owner, name, None) is not None


def _kept(value: Any) -> Iterator[Any]:
    """Containers that a function has as defaults, and so keeps from one call to the next."""
    for function in (value, *_wrapped(value)):
        if isinstance(function, FunctionType):
            named = (function.__kwdefaults__ or {}).values()
            for default in (*(function.__defaults__ or ()), *named):
                if isinstance(default, list | dict | set):
                    yield default


def _wrapped(function: Any) -> Iterator[Any]:
    """The function in a decorator that left no other trace."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a cell may be empty
            yield cell.cell_contents


def _owners(package: str) -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and isinstance(module, ModuleType):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value


def _variables(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        special = name.startswith("__") and not hasattr(value, "cache_clear")
        if not special and not isinstance(value, ModuleType):
            yield name, value
