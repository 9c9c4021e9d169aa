"""The entries of a state mapping, enumerated again where they may hold other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress, groupby
from operator import is_, not_
from typing import Any

import torch

from megatron_ft.trainer.enumeration import (
    DENSE,
    Enumeration,
    enumerate_entry,
    enumerate_plain,
    is_optimizer,
)
from megatron_ft.trainer.stock_module import StockModule
from megatron_ft.trainer.stock_optimizer import StockOptimizer


class Entries:
    """What is in a mapping, as of the last ``refresh``.

    Plain tensors are those of last time if they are the same objects, modules and optimizers
    where StockModule and StockOptimizer can tell; everything else may hold other tensors than
    last time without being another object, and is enumerated each time.
    """

    def __init__(self, state: Mapping[str, Any], forced: Mapping[str, bool]) -> None:
        """``forced`` tells of entries by name whether they are copied lazily; see enumerate_entry.
        Nothing is read yet."""
        self._state, self._forced = state, forced
        self.forget()

    def forget(self) -> None:
        """Let go of all that was found."""
        self._names: list[str] = []
        self._is_plain: list[bool] = []
        self._values: list[Any] = []
        self._runs: list[_Entry | Enumeration] = []
        self._found: Enumeration | None = None

    def refresh(self) -> Enumeration:
        """All entries as they are now; the very Enumeration of last time while its tensors are.

        Nobody else changes what is returned.
        """
        values, entries = self._look(), self._changeable()
        # Should one raise, what was merged before may not be what the others hold by now.
        found, self._found = self._found, None
        changed = [entry.refresh(value) for entry, value in zip(entries, values, strict=True)]
        parts = [run.found if isinstance(run, _Entry) else run for run in self._runs]
        if found is None or any(changed):
            found = _merged(parts)
        found.structures = {name: kept for part in parts for name, kept in part.structures.items()}
        self._found = found
        return found

    def objects_loaded(self) -> None:
        """Let go of what objects held before they loaded; plain tensors are those of before."""
        if self._changeable():
            self.forget()

    def _changeable(self) -> list[_Entry]:
        return [run for run in self._runs if isinstance(run, _Entry)]

    def _look(self) -> list[Any]:
        """All that is no plain tensor; starts anew unless the plain tensors are the same."""
        names, values = list(self._state), list(self._state.values())
        if names == self._names and all(map(is_, values, self._values)):
            # Nobody looks at each: reading thousands of tensors' types takes longer.
            return list(compress(values, map(not_, self._is_plain)))
        is_plain = list(map(DENSE.__contains__, map(type, values)))
        plain = list(compress(values, is_plain))
        same = names == self._names and is_plain == self._is_plain
        if not same or not all(map(is_, plain, compress(self._values, self._is_plain))):
            self.forget()
            self._runs = self._begin(names, values, is_plain)
        self._names, self._is_plain, self._values = names, is_plain, values
        return list(compress(values, map(not_, is_plain)))

    def _begin(
        self, names: list[str], values: list[Any], is_plain: list[bool]
    ) -> list[_Entry | Enumeration]:
        """Plain tensors that follow one another are enumerated together, now."""
        runs: list[_Entry | Enumeration] = []
        start = 0
        for plain, run in groupby(is_plain):
            stop = start + len(list(run))
            if plain:
                found = enumerate_plain(names[start:stop], values[start:stop], self._forced)
                runs.append(found)
            else:
                runs += [_Entry(name, self._forced.get(name)) for name in names[start:stop]]
            start = stop
        return runs


class _Entry:
    """What may hold other tensors than last time."""

    def __init__(self, name: str, force: bool | None) -> None:
        self.found = Enumeration()
        self._name, self._force = name, force
        self._known: StockModule | StockOptimizer | None = None

    def refresh(self, value: Any) -> bool:
        """Whether tensors or names may be others than last time; ``found`` says what is there."""
        known, self._known = self._known, None
        if known is None or known.value is not value or not known.holds(self.found):
            return self._enumerate(value, known is not None)
        self._known = known
        return False

    def _enumerate(self, value: Any, was_known: bool) -> bool:
        before, known = self.found, self._look(value)
        self.found = Enumeration()
        enumerate_entry(self.found, self._name, value, self._force)
        if known is not None and known.learn(self.found):
            self._known = known
        return was_known or self._known is not None or not before.same_tensors(self.found)

    def _look(self, value: Any) -> StockModule | StockOptimizer | None:
        if isinstance(value, torch.nn.Module):
            return StockModule(value)
        if is_optimizer(value):
            return StockOptimizer(value, self._name, self._force is not False)
        return None


def _merged(parts: Iterable[Enumeration]) -> Enumeration:
    found = Enumeration()
    for part in parts:
        found.add(part)
    return found
