"""Values that belong to an engine but live beside it, so that nothing of DeepSpeed's is changed."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerEngine(Generic[T]):
    """One value per engine, gone with the engine."""

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def get(self, engine: Any) -> T | None:
        """The value, None if there is none."""
        return self._values.get(engine)

    def set(self, engine: Any, value: T) -> None:
        """Replace the value."""
        self._values[engine] = value
