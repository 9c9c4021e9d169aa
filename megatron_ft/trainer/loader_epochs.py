"""The epochs of samplers and data sets that are given their number by ``set_epoch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EpochNumbers:
    """The epochs of samplers and data sets with ``set_epoch``, seen through the script's counting.

    After a restore a script may begin again at its first number.  So the difference between
    its number and the true one is kept, and added to its later numbers.
    """

    def __init__(self, numbered: Sequence[Any]) -> None:
        self._numbered = [one for one in numbered if callable(getattr(one, "set_epoch", None))]
        self._set = [one.set_epoch for one in self._numbered]
        self._true: list[int | None] = [getattr(one, "epoch", None) for one in self._numbered]
        self._by_script = self.current()
        self._offset = [0] * len(self._numbered)
        for index, one in enumerate(self._numbered):
            one.set_epoch = _Listening(self, index, one)

    def script_set(self, index: int, epoch: int) -> None:
        self._by_script[index] = epoch
        self._true[index] = epoch + self._offset[index]
        self._set[index](epoch + self._offset[index])

    def current(self) -> list[int | None]:
        """The true epochs; None where none was set and the object has no ``epoch``."""
        pairs = zip(self._numbered, self._true, strict=True)
        found = [getattr(one, "epoch", true) for one, true in pairs]
        return [int(epoch) if isinstance(epoch, int) else None for epoch in found]

    def since(self, epochs: Sequence[int | None]) -> list[tuple[Any, int | None, int | None]]:
        return list(zip(self._numbered, epochs, self.current(), strict=False))

    def set(self, epochs: Sequence[int | None]) -> None:
        """Put the objects at these, until the script sets others."""
        for index, epoch in enumerate(epochs[: len(self._numbered)]):
            if epoch is not None:
                self._true[index] = epoch
                self._set[index](epoch)

    def resume(self, epochs: Sequence[int | None]) -> None:
        """Continue in these epochs, whatever number the script has for them."""
        for index, epoch in enumerate(epochs[: len(self._numbered)]):
            given = self._by_script[index]
            if epoch is not None and given is not None:
                self._offset[index] = epoch - given
        self.set(epochs)

    def asks_for_next(self, epochs: Sequence[int | None]) -> bool:
        """True if the script has set the numbers that follow these."""
        pairs = [pair for pair in zip(epochs, self._by_script, strict=False) if pair[0] is not None]
        return bool(pairs) and all(given == (epoch or 0) + 1 for epoch, given in pairs)


class _Listening:
    """Stands for an object's ``set_epoch``; a copy of the object, as workers get, has its own."""

    def __init__(self, numbers: EpochNumbers, index: int, owner: Any) -> None:
        self._numbers, self._index, self._owner = numbers, index, owner

    def __call__(self, epoch: int) -> None:
        self._numbers.script_set(self._index, epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, "set_epoch")
