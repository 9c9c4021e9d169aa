"""The tensors that inner optimizers own: masters, and what is kept for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from megatron_ft.capture.contents import Contents
from megatron_ft.capture.enumeration import DENSE
from megatron_ft.capture.inner_optimizer import SCALES, state_numbers, state_tensors


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
        self._by_inner: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        for _, inner, parameter in self._masters:
            self._by_inner.setdefault(id(inner), (inner, []))[1].append(parameter)
        self._found: dict[str, torch.Tensor] = {}
        self._numbered: list[Owned] = []
        self._seen: Contents | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as of now; nobody changes the dict, which is the same while they are.

        Plain tensors and parameters are given as they are, so that it shows where they lie.
        """
        now = self._look()
        if self._seen is None or not self._seen.same(now):
            self._find(now)
        return self._found

    def numbers(self) -> dict[str, dict[str, Any]]:
        """What is kept beside tensors, by the master's name, of those of which anything is.

        As of now; which ones these are was seen by the last ``tensors()``.
        """
        return {name: state_numbers(inner, of) for name, inner, of in self._numbered}

    def forget(self) -> None:
        """Let go of what is kept for masters, until it is asked for."""
        self._seen, self._found, self._numbered = None, {}, []

    def _look(self) -> Contents:
        kept: list[Mapping[str, Any]] = []
        for inner, parameters in self._by_inner.values():
            kept += map(inner.state.__getitem__, parameters)
            if scales := getattr(inner, SCALES, None):
                kept += [scales.get(parameter, {}) for parameter in parameters]
        contents = Contents.of(kept)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in contents.values]
        return contents._replace(values=tensors)

    def _find(self, now: Contents) -> None:
        self._seen, self._found = None, {}
        for master in self._masters:
            kept = {self._own: master.parameter, **state_tensors(master.inner, master.parameter)}
            for name, tensor in kept.items():
                self._found[f"{master.name}{self._separator}{name}"] = as_captured(tensor)
        self._numbered = [m for m in self._masters if state_numbers(m.inner, m.parameter)]
        # A view that is made of anything else would be of the memory that this had then.
        if {*map(type, now.values), *(type(m.parameter) for m in self._masters)} <= _REMEMBERED:
            self._seen = now


def as_captured(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is a plain one or a parameter; of any other kind, its data."""
    return tensor if type(tensor) in DENSE else tensor.detach()


_REMEMBERED = DENSE | {type(None)}
