"""Classes whose instances may be among the small objects: named, and made from plain values.

Reading makes instances of these classes and of no others, so bytes cannot choose what runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any

from megatron_ft.core.errors import ConfigError

ToPlain = Callable[[Any], Any]
FromPlain = Callable[[Any], Any]


@dataclass(frozen=True)
class KnownClass:
    """One class: its name in encoded bytes, and the way there and back."""

    name: str
    to_plain: ToPlain
    from_plain: FromPlain


_by_class: dict[type, KnownClass] = {}
_by_name: dict[str, tuple[type, KnownClass]] = {}


def name_of(cls: type) -> str:
    """``module:class``, by which a class is known if it was given no other name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register_class(
    cls: type,
    *,
    name: str | None = None,
    to_plain: ToPlain | None = None,
    from_plain: FromPlain | None = None,
) -> None:
    """Let snapshots hold instances of exactly ``cls``.

    ``to_plain(instance)`` gives a value of plain types, arrays, tensors and registered classes,
    ``from_plain(value)`` an instance again.  Enumerations, dataclasses and named tuples need
    neither.  ``name`` (default ``module:class``) is stored, and must stay the same as long as
    snapshots are to be read.  Call it on import, so that whoever reads a snapshot can do it too.

    ConfigError if the functions are missing, or the name is that of another class.
    """
    given = _given(cls, to_plain, from_plain)
    known = KnownClass(name or name_of(cls), *given)
    owner, _ = _by_name.get(known.name, (cls, known))
    if owner is not cls and name_of(owner) != name_of(cls):
        raise ConfigError(
            f"{known.name!r} is registered for {name_of(owner)}; give {name_of(cls)} another name"
        )
    _by_class[cls] = known
    _by_name[known.name] = (cls, known)


def known_class(cls: type) -> KnownClass | None:
    """What is registered for exactly this class."""
    return _by_class.get(cls)


def known_name(name: str) -> KnownClass | None:
    """What is registered under a name."""
    found = _by_name.get(name)
    return None if found is None else found[1]


def _given(
    cls: type, to_plain: ToPlain | None, from_plain: FromPlain | None
) -> tuple[ToPlain, FromPlain]:
    if to_plain is not None and from_plain is not None:
        return to_plain, from_plain
    if to_plain is None and from_plain is None and (usual := usual_way(cls)) is not None:
        return usual
    raise ConfigError(
        f"{name_of(cls)} cannot be registered without to_plain and from_plain: it is no "
        "enumeration, dataclass or named tuple"
    )


def usual_way(cls: type) -> tuple[ToPlain, FromPlain] | None:
    """How enumerations, named tuples and dataclasses become plain values and back; else None."""
    if issubclass(cls, Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, Enum):
        # Not cls.__getitem__: an enumeration of texts has that of texts.
        return (lambda member: member.name), (lambda name: cls[name])
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return tuple, cls._make
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return (lambda value: {name: getattr(value, name) for name in names}), _Filler(cls, names)
    return None


class _Filler:
    """Makes an instance from its fields, as they are: nothing is computed anew."""

    def __init__(self, cls: type, names: list[str]) -> None:
        self._cls, self._names = cls, names

    def __call__(self, fields: dict[str, Any]) -> Any:
        if sorted(fields) != sorted(self._names):
            raise ValueError(f"fields {sorted(fields)} instead of {sorted(self._names)}")
        made: Any = object.__new__(self._cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made
