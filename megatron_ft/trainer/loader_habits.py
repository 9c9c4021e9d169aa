"""Ways to read a loader that no count of batches can follow, each with what to write instead."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import GeneratorType
from typing import Any

_CARRIERS: tuple[type, ...] = (
    *(zip, map, filter, enumerate, tuple, GeneratorType, itertools.cycle, itertools.islice),
    *(itertools.chain, itertools.starmap, itertools.takewhile, itertools.zip_longest),
)
"""Types that may stand between a loader's iterator and ``itertools.cycle``."""

MOST_CARRIERS = 6

_ENDLESS = "write a function instead that loops `while True: yield from loader`"


class Clock:
    """Iterations that have ended in this process, and those in which batches were read last."""

    runs = False
    """True if somebody counts the iterations."""
    ended = 0
    read = finished = -1
    thread: int | None = None


def readers(iterators: Iterable[Any]) -> set[type]:
    """Classes of the iterators that read these, themselves or through others.

    Examines all objects of the process, up to MOST_CARRIERS times.
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
        """Note the ``batches`` that were read in it; not ``whole`` if a pass ended there."""
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


class Reading:
    """The way in which a program reads one loader, pass by pass."""

    def __init__(self) -> None:
        self._pace, self._given, self._ended = ReadingPace(), 0, False
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._alternating: tuple[Any, Any] | None = None
        self._in_cycle = self._spans = False

    def begins(self, iterator: Any) -> None:
        self._iterators.add(iterator)

    def count_batch(self) -> None:
        self._given += 1

    def alternates(self, one: Any, other: Any) -> None:
        """A batch of one pass was read behind batches of a newer one."""
        self._alternating = one, other

    def ends(self) -> None:
        self._ended = True

    def iteration_ended(self, *, in_pass: bool) -> None:
        self._pace.iteration_ended(self._given, whole=not self._ended)
        self._spans |= bool(self._given) and in_pass
        self._given, self._ended = 0, False

    def pace(self) -> list[int]:
        return self._pace.state_dict()

    def restarts(self, pace: Sequence[int]) -> None:
        self._pace.load_state_dict(pace)
        self._given = 0

    def problem(
        self, at: Any, live: Sequence[Any], passes: int, warn: Callable[[str], None]
    ) -> str:
        """The reason why no count of batches says what training has used, '' if there is none.

        ``at`` is the pass that is read, None between passes; ``live`` are those that are open, and
        ``passes`` is the number of all.
        """
        if Clock.ended and self._iterators:
            kinds = readers(self._iterators)
            self._iterators.clear()
            self._in_cycle |= itertools.cycle in kinds
            if itertools.islice in kinds and at is not None and at.place and at.place["consumed"]:
                warn(
                    f"a pass continues behind batch {at.place['consumed']}, and itertools.islice "
                    "counts its limit anew: compute the limit from the number of the iteration"
                )
        if self._in_cycle:
            return f"itertools.cycle keeps the batches of the first pass: {_ENDLESS}"
        if self._alternating is not None and all(one in live for one in self._alternating):
            return "two iterators read it in turn: wrap a DataLoader for each of them"
        if at is None and passes and Clock.ended > Clock.read + 1:
            unread = f"its pass is over, and no loader was read in this iteration: {_ENDLESS}"
            if self._spans:
                return unread
            warn(f"{unread}, if training uses its batches")
        elsewhere = at is not None and at.thread != Clock.thread
        if elsewhere and None not in (at.thread, Clock.thread):
            return (
                "another thread reads it, ahead of training: read it where you train; num_workers "
                "and prefetch_factor have workers read ahead"
            )
        if ahead := self._pace.ahead:
            return (
                f"the first iteration read {ahead} batches more than later ones: read a batch in "
                "the iteration that uses it, and call save() in each; num_workers and "
                "prefetch_factor have workers read ahead"
            )
        return ""
