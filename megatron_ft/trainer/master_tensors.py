"""The tensors that inner optimizers own: masters, and what is kept for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from megatron_ft.trainer.contents import Contents, same_objects
from megatron_ft.trainer.enumeration import DENSE
from megatron_ft.trainer.inner_optimizer import SCALES, state_numbers, state_tensors

_VALUES = methodcaller("values")


class Owned(NamedTuple):
    """One tensor that ``inner`` updates, under the name that begins all names of it."""

    name: str
    inner: Any
    parameter: torch.Tensor


class MasterTensors:
    """Tensors to capture by name: each master as ``{name}{separator}{own}``, and what its inner
    optimizer keeps for it as ``{name}{separator}{kept}``, scales included.

    Whether they are the tensors of last time is asked in calls that loop in C, and only if they
    are not is each looked at.
    """

    def __init__(self, masters: Iterable[Owned], separator: str, own: str) -> None:
        self._masters, self._separator, self._own = list(masters), separator, own
        self._inner = list({id(master.inner): master.inner for master in self._masters}.values())
        self._found: dict[str, torch.Tensor] = {}
        self._numbered: list[Owned] = []
        self._seen: tuple[_Kept, _Kept] | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as of now; nobody changes the dict, which is the same while they are.

        Plain tensors and parameters are given as they are, so that it shows where they lie.
        """
        if not self._unchanged():
            self._find()
        return self._found

    def numbers(self) -> dict[str, dict[str, Any]]:
        """What is kept beside tensors, by the master's name, of those of which anything is.

        As of now; which ones these are was seen by the last ``tensors()``.
        """
        if not self._found:
            # Forgotten: to say that there are none would leave them out of a snapshot.
            self._find()
        return {name: state_numbers(inner, of) for name, inner, of in self._numbered}

    def forget(self) -> None:
        """Let go of what is kept for masters, until it is asked for."""
        self._seen, self._found, self._numbered = None, {}, []

    def _unchanged(self) -> bool:
        """Whether the very tensors of last time are kept; numbers may be others."""
        if self._seen is None:
            return False
        (everything, tensors), now = self._seen, _Kept.of(self._inner)
        # Most keep tensors alone, and then nobody looks at each of them.
        return everything.same(now) or tensors.same(now.only_tensors())

    def _find(self) -> None:
        self._seen, self._found = None, {}
        for master in self._masters:
            kept = {self._own: master.parameter, **state_tensors(master.inner, master.parameter)}
            for name, tensor in kept.items():
                self._found[f"{master.name}{self._separator}{name}"] = as_captured(tensor)
        self._numbered = [m for m in self._masters if state_numbers(m.inner, m.parameter)]
        now = _Kept.of(self._inner)
        tensors = now.only_tensors()
        # A view that is made of anything else would be of the memory that this had then.
        kinds = {*map(type, tensors.contents.values)} - {type(None)}
        if DENSE.issuperset(kinds | {type(master.parameter) for master in self._masters}):
            self._seen = now, tensors


class _Kept(NamedTuple):
    """What inner optimizers keep, and for which parameters, whose order they keep too."""

    parameters: list[Any]
    contents: Contents

    @classmethod
    def of(cls, inner: Iterable[Any]) -> _Kept:
        found = [state for one in inner for state in (one.state, getattr(one, SCALES, {}))]
        kept = chain.from_iterable(map(_VALUES, found))
        return cls(
            list(chain.from_iterable(found)),
            Contents.of([one for one in kept if isinstance(one, dict)]),
        )

    def same(self, other: _Kept) -> bool:
        same = same_objects(self.parameters, other.parameters)
        return same and self.contents.same(other.contents)

    def only_tensors(self) -> _Kept:
        values = self.contents.values
        tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
        return self._replace(contents=self.contents._replace(values=tensors))


def as_captured(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is a plain one or a parameter; of any other kind, its data."""
    return tensor if type(tensor) in DENSE else tensor.detach()
