"""Variables of a package's modules and classes, noted before a training and restored after it.

A framework keeps its groups, models and modes in many of them, and their names change with each
release.  What a module binds anew is restored.  Content of containers is not: modules register
themselves there when they are imported, which happens once in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any


class PackageState:
    """What all variables of a package's loaded modules, and of their classes, are bound to now."""

    def __init__(self, package: str) -> None:
        self._noted = [(owner, dict(_variables(owner))) for owner in _owners(package)]

    def restore(self) -> None:
        """Bind them to the same objects again, and forget what functions have cached."""
        for owner, noted in self._noted:
            for name, value in noted.items():
                if vars(owner).get(name) is not value:
                    # Some classes refuse; those have changed nothing either.
                    with suppress(AttributeError, TypeError):
                        setattr(owner, name, value)
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


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
