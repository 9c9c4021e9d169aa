"""Fills values that a program holds with stored ones, so that it sees them under its own names."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def filled(old: Any, new: Any) -> Any:
    """``old`` made equal to ``new``, or ``new`` where ``old`` is of no kind that can be filled.

    Filled are dicts, lists, deques, sets, bytearrays, arrays and tensors of one form, dataclasses
    and namespaces, and what is in them.  What is one object twice in ``new`` is so in the result.
    """
    return _Filling().value(old, new)


def can_fill(value: Any) -> bool:
    """True if a load leaves the object in its place."""
    return _way(value, value) is not None


class _Filling:
    """One pass over a value; a stored object takes the place of one object, and only once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()
        self._kept: list[Any] = []

    def value(self, old: Any, new: Any) -> Any:
        if old is new:
            return new
        if id(new) in self._made:
            return self._made[id(new)]
        if type(new) is type(old) and isinstance(new, tuple) and len(new) == len(old):
            parts = [self.value(one, other) for one, other in zip(old, new, strict=True)]
            return new._make(parts) if hasattr(new, "_make") else type(new)(parts)
        way = None if id(old) in self._used else _way(old, new)
        if way is None:
            return new
        self._made[id(new)] = old
        self._used.add(id(old))
        self._kept.append(new)  # a freed object's id would be given out again
        way(self, old, new)
        return old

    def mapping(self, old: MutableMapping[Any, Any], new: Mapping[Any, Any]) -> None:
        values = {k: self.value(old[k], v) if k in old else v for k, v in new.items()}
        if list(old) != list(values):
            old.clear()
        for key, value in values.items():
            if key not in old or old[key] is not value:
                old[key] = value

    def sequence(self, old: Any, new: Any) -> None:
        before = list(old)[: len(new)]
        values = [self.value(one, other) for one, other in zip(before, new, strict=False)]
        values += list(new)[len(before) :]
        old.clear()
        old.extend(values)

    def set_of(self, old: set[Any], new: set[Any]) -> None:
        old.clear()
        old.update(new)

    def elements(self, old: Any, new: Any) -> None:
        old[...] = new

    def tensor(self, old: torch.Tensor, new: torch.Tensor) -> None:
        with torch.no_grad():
            old.copy_(new)

    def attributes(self, old: Any, new: Any) -> None:
        self.mapping(vars(old), vars(new))


_Way = Callable[[_Filling, Any, Any], None]


def _way(old: Any, new: Any) -> _Way | None:
    if isinstance(old, MutableMapping) and isinstance(new, Mapping):
        return _Filling.mapping
    if type(old) is not type(new):
        return None
    if isinstance(old, list | bytearray) or (isinstance(old, deque) and old.maxlen == new.maxlen):
        return _Filling.sequence
    if isinstance(old, set):
        return _Filling.set_of
    if isinstance(old, torch.Tensor) or isinstance(old, np.ndarray):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return None
        return _Filling.tensor if isinstance(old, torch.Tensor) else _Filling.elements
    return _Filling.attributes if _has_plain_attributes(old) else None


def _has_plain_attributes(value: Any) -> bool:
    if isinstance(value, SimpleNamespace | Namespace):
        return True
    dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    frozen = dataclass and value.__dataclass_params__.frozen
    return bool(dataclass and not frozen and hasattr(value, "__dict__"))
