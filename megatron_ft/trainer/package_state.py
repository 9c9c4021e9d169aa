"""Variables of a package's modules and classes, noted before a training and restored after it.

A framework keeps its groups, models and modes in many of them, and their names change with each
release.  What a module binds anew is restored.  Content of containers is not: modules register
themselves there when they are imported, which happens once in a process.  Containers that are
defaults of parameters are no such registries, and count what functions do: those are restored.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import suppress
from inspect import getattr_static
from types import FunctionType, ModuleType
from typing import Any


class PackageState:
    """What all variables of a package's loaded modules, and of their classes, are bound to now."""

    def __init__(self, package: str) -> None:
        self._noted = [(owner, dict(_variables(owner))) for owner in _owners(package)]
        values = (value for _, noted in self._noted for value in noted.values())
        self._defaults = [(found, copy.copy(found)) for value in values for found in _kept(value)]

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
        for default, content in self._defaults:
            default.clear()
            add = default.extend if isinstance(default, list) else default.update
            add(content)


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
    """What a decorator that left no other trace has around it."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a cell may be empty
            yield cell.cell_contents


def _owners(package: str) -> Iterator[Any]:
    """The modules of a package, and the classes that they define."""
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
