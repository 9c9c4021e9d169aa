"""Epoch numbers of samplers, which scripts set by counting and may count from 0 in each life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def samplers_of(loader: Any) -> list[Any]:
    """The samplers that a loader draws from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (
        getattr(loader, "data_sampler", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found: list[Any] = []
    for one in candidates:
        if one is not None and not any(one is other for other in found):
            found.append(one)
    return found


class EpochNumbers:
    """The epochs of samplers that have ``set_epoch``, seen through the script's own counting.

    After a restore a script may begin again at its first number.  So the difference between
    what it says and what was true is kept, and added to what it says later.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = [s for s in samplers if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        self._said = [sampler.epoch for sampler in self._samplers]
        self._offset = [0] * len(self._samplers)
        for index, sampler in enumerate(self._samplers):
            sampler.set_epoch = self._listening(index, sampler.set_epoch)

    def _listening(self, index: int, original: Callable[[int], None]) -> Callable[[int], None]:
        def set_epoch(epoch: int) -> None:
            self._said[index] = epoch
            original(epoch + self._offset[index])

        return set_epoch

    def current(self) -> list[int]:
        """The true epochs."""
        return [sampler.epoch for sampler in self._samplers]

    def set(self, epochs: Sequence[int]) -> None:
        """Put the samplers at these, until the script says otherwise."""
        for sampler, epoch in zip(self._samplers, epochs, strict=True):
            sampler.epoch = epoch

    def resume(self, epochs: Sequence[int]) -> None:
        """Go on in these epochs, whatever number the script has for them."""
        self._offset = [epoch - said for epoch, said in zip(epochs, self._said, strict=True)]
        self.set(epochs)

    def asks_for_next(self, epochs: Sequence[int]) -> bool:
        """True if the script has said the numbers that follow these."""
        return bool(epochs) and all(
            said == epoch + 1 for epoch, said in zip(epochs, self._said, strict=True)
        )
