"""Ways to read a loader that no count of batches can follow, each with what to write instead."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import Any

_CARRIERS: tuple[type, ...] = (
    *(zip, map, filter, enumerate, tuple, GeneratorType, itertools.cycle, itertools.islice),
    *(itertools.chain, itertools.starmap, itertools.takewhile, itertools.zip_longest),
)
"""Types that may stand between a loader's iterator and ``itertools.cycle``."""

MOST_CARRIERS = 6

ENDLESS = "write a function instead that loops `while True: yield from loader`"


LIMITED = (
    "a pass continues behind batch {}, and itertools.islice counts its limit anew: compute the "
    "limit from the number of the iteration"
)


def readers(iterators: Iterable[Any]) -> set[type]:
    """Classes of the iterators that read these, themselves or through others.

    Looks at all objects of the process, once or twice.
    """
    kinds = set[type]()
    found = [one for one in iterators if one is not None]
    for _ in range(MOST_CARRIERS):
        if not found:
            break
        found = [one for one in gc.get_referrers(*found) if isinstance(one, _CARRIERS)]
        kinds.update(map(type, found))
    return kinds


class ReadingPace:
    """Batches of each iteration: a program that reads ahead takes more in its first than later.

    Iterations in which a pass begins or ends count only as the first.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._later: list[int] = []
        self._before: int | None = None

    def iteration_ended(self, batches: int, *, whole: bool) -> None:
        """So many batches were read in it; not ``whole`` if a pass ended there."""
        if self._first is None:
            self._first = batches if whole else 0
        elif whole and (len(self._later) < 2 or self._later[-1] != batches):
            self._later = [*self._later, batches][-2:]

    @property
    def _steady(self) -> int | None:
        return self._later[0] if len(self._later) == 2 and len({*self._later}) == 1 else None

    @property
    def ahead(self) -> int:
        """Batches that the program has read but not used; 0 if nothing points to any."""
        steady = self._steady if self._later else self._before
        return 0 if steady is None or self._first is None else max(0, self._first - steady)

    def state_dict(self) -> list[int]:
        """The number of batches of an iteration, if it was the same in all."""
        return [] if self._steady is None else [self._steady]

    def load_state_dict(self, state: Sequence[int]) -> None:
        """The next iteration is the first of a restart, to be compared with those before."""
        self._first, self._later = None, []
        self._before = state[0] if state else None
