"""Frameworks that the project hooks into: releases that work, names it needs, and wrapping them.

Releases move and rename things without notice; parameter *names* are what callers rely on.
Nothing here imports a framework that is not imported already, but ``owner_at``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron_ft.core.errors import UnsupportedVersionError


class Releases(NamedTuple):
    """One framework: its name, its distribution, the oldest release, and those tested.

    Newer ones are tried if they have the names that are used.
    """

    name: str
    distribution: str
    oldest: tuple[int, ...]
    working: str


MEGATRON = Releases("Megatron", "megatron-core", (0, 17), "megatron-core 0.17.1, 0.18.2 and 0.19.2")
DEEPSPEED = Releases("DeepSpeed", "deepspeed", (0, 18, 1), "deepspeed 0.18.9 and 0.19.8")


_NOTED = {"torch": "torch", "megatron.core": "megatron-core", "deepspeed": "deepspeed"}
"""Modules whose versions are kept with the evidence of a failure, and their distributions."""


def imported_versions() -> dict[str, str]:
    """Versions of this Python and of what it has imported, as the modules themselves say."""
    modules = {module: sys.modules.get(module) for module in _NOTED}
    found = {name: getattr(modules[module], "__version__", "") for module, name in _NOTED.items()}
    versions = {name: str(version) for name, version in found.items() if version}
    return {"python": platform.python_version(), **versions}


class Required(NamedTuple):
    """A function of a framework and the parameter names that are used; order does not matter."""

    owner: str
    name: str
    parameters: tuple[str, ...] = ()


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``0.19.0rc1`` gives (0, 19)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def missing_names(owner: Any, required: Required) -> list[str]:
    """The parts of a required function that ``owner`` lacks, in words; empty if none."""
    function = getattr(owner, required.name, None)
    where = f"{required.owner}.{required.name}"
    if not callable(function):
        return [f"function {where}"]
    parameters = inspect.signature(function).parameters
    return [f"parameter {p!r} of {where}" for p in required.parameters if p not in parameters]


def owner_at(path: str) -> Any:
    """A module, or a class in one, by its dotted path; None if it is not there."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(owner_at(module), name, None) if module else None


def check_release(
    releases: Releases, version: str, required: Iterable[Required], switch: str
) -> None:
    """UnsupportedVersionError if a release is too old, or else with all names that it lacks.

    ``switch`` is what turns snapshots on.
    """
    name, working = releases.name, releases.working
    if version_numbers(version) < releases.oldest:
        raise UnsupportedVersionError(
            f"{name} {version} is too old for in-memory snapshots, which work with {working}; "
            f"upgrade {name}, or train without {switch}"
        )
    missing = [text for entry in required for text in missing_names(owner_at(entry.owner), entry)]
    if missing:
        raise UnsupportedVersionError(
            f"{name} {version} has no {'; no '.join(missing)}. In-memory snapshots work with "
            f"{working}: use one of those, or train without {switch}"
        )


Function = Callable[..., Any]

_MARK = "_megatron_ft_wrapper"


def wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Put ``make(original)`` in the place of a function of a module or class.

    A function that was wrapped here before stays as it is, so a second call changes nothing.
    """
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)
