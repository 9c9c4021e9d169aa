"""The position of one data loader, and the rest of an interrupted pass from a fresh loader.

A position is all that decides the order of a pass when it began, and the number of batches since.
From these the same order is drawn again, and the batches that were used are skipped, without being
read where the loader's sampler can skip.  The trace of what is skipped must be that of what
was used; a position that the loader keeps itself is checked in the same way.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer.loader_epochs import EpochNumbers
from megatron_ft.trainer.loader_habits import ENDLESS, ReadingPace, in_cycle
from megatron_ft.trainer.loader_order import READERS, OwnState, numbered, samplers_of
from megatron_ft.trainer.loader_trace import (
    BatchTrace,
    ItemTrace,
    SharedDraws,
    is_right,
    new_workers,
    read,
    workers_of,
)
from megatron_ft.trainer.state import RngState

logger = logging.getLogger(__name__)

awaiting_batch: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose ``reading()`` is called before a pass gives its first batch: the pass continues
from what that restores."""

SHARED_ANEW = "shared_anew"
"""Key of a position that ranks of another number take: their batches a step, and the old ones'."""


class Clock:
    """Iterations that have ended in this process, and those in which batches were read last."""

    runs = False
    """True if somebody counts the iterations."""
    ended = 0
    read = finished = -1
    thread: int | None = None


@dataclass(eq=False)
class Pass:
    """A pass over the data: all that decided its order, and what it has handed out."""

    begun: dict[str, Any]
    batches: Iterator[Any]
    trace: BatchTrace | ItemTrace | None
    consumed: int = 0
    began_in: int = 0
    read_in: int = -1
    thread: int | None = None
    restored: dict[str, Any] | None = None
    # A loader's own position, and the count and trace of batches behind it.
    own: tuple[Any, int, BatchTrace] | None = None
    ask_at: float = 0.0
    finished: bool = False


class LoaderPosition:
    """The position of any iterable that gives the same batches again: they are read and dropped.

    Generators and counters of the loader, its samplers and its data set are set to where the pass
    began.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._own = OwnState(loader)
        self._epochs, self._passes = EpochNumbers(self._numbered()), 0
        # Those when persistent workers were made.
        self._first_epochs: list[int | None] = []
        self._live: list[Pass] = []
        self._at: Pass | None = None
        self._pending: dict[str, Any] | None = None
        # An iterator that was made before a restore between two passes.
        self._stale: Pass | None = None
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._twice: tuple[Pass, Pass] | None = None
        self._draws, self._in_cycle = SharedDraws(), False
        self._pace, self._given, self._ended = ReadingPace(), 0, False
        self._spans, self._warned = False, False

    def _numbered(self) -> list[Any]:
        return numbered(self.loader)

    @property
    def _consumed(self) -> int | None:
        return None if self._at is None else self._at.consumed

    def begin(self) -> Iterator[Any]:
        """A new pass over the data, or the rest of the one that a restore brought back."""
        if self._pending is not None and self._next_was_asked_for(self._pending):
            self._finish(self._pending)
        self._first_epochs = self._first_epochs or self._epochs.current()
        self._passes += 1
        self._at = self._open()
        self._live.append(self._at)
        batches = self._batches(self._at)
        self._iterators.add(batches)
        return batches

    def _finish(self, pending: dict[str, Any]) -> None:
        """Be behind the end of a pass that is pending."""
        self._own.set(pending["now"], between=True)
        self._pending = None

    def _batches(self, one: Pass) -> Iterator[Any]:
        """Count what a pass hands out; it jumps to a position that is restored meanwhile."""
        end = object()
        for other in [*awaiting_batch]:
            other.reading()
        try:
            while True:
                if one is self._at and (self._pending is not None or self._stale is one):
                    vars(one).update(vars(self._open()))
                batch = self._next(one, end)
                if batch is end:
                    one.finished = True
                    return
                self._took(one, batch)
                yield batch
        finally:
            # Also when the training loop has dropped it: nobody will continue it.  At the end of
            # the process modules are empty already, and nothing is left to be counted.
            if Clock is not None:
                self._over(one)

    def _next(self, one: Pass, end: object) -> Any:
        draws = isinstance(one.trace, ItemTrace) or one.own is not None
        return next(one.batches, end) if draws else self._draws.next(one.batches, end)

    def _took(self, one: Pass, batch: Any) -> None:
        newer = self._at
        if newer is not one and newer in self._live and newer is not None and newer.consumed:
            self._twice = (one, newer)
        self._at = one
        one.consumed += 1
        self._given += 1
        Clock.read = one.read_in = Clock.ended
        one.thread = threading.get_ident()
        if one.trace is not None:
            one.trace.took(batch)

    def _over(self, one: Pass) -> None:
        self._live.remove(one)
        self._ended = True
        if one.finished:
            Clock.finished = Clock.ended
        if one is not self._at:
            return
        # One that was read for something else within an iteration leaves the other where it was.
        back = [p for p in self._live if p.read_in == one.began_in == Clock.ended]
        self._at = back[-1] if back else None
        if self._was_a_look(one) and not back:
            place = one.restored
            logger.warning(
                "%s: a pass that continued behind batch %d was left before the first save: the "
                "next one continues there. Read before load() what is not trained on",
                *(self._name(), one.consumed - 1),
            )
            self._pending = place

    def _was_a_look(self, one: Pass) -> bool:
        """True for a restored pass that gave one batch, and was left before the first save."""
        looked = one.restored is not None and one.consumed - one.restored["consumed"] == 1
        in_time = Clock.runs and one.began_in == Clock.ended
        # A zip() leaves a loader where another one ends.
        return (
            looked and in_time and Clock.finished < Clock.ended and not self._is_last(one.consumed)
        )

    def _is_last(self, consumed: int) -> bool:
        try:
            return bool(consumed >= len(self.loader))
        except TypeError:  # nobody knows how many there are
            return False

    def _open(self) -> Pass:
        self._stale = None
        self._draws.begin()
        if self._pending is None:
            begun = self._moment()
            batches, trace = self._fresh()
            return Pass(begun, batches, trace, began_in=Clock.ended)
        place, self._pending = self._pending, None
        self._epochs.resume(place["begun"]["epochs"])
        now = RngState().state_dict()
        try:
            return self._replayed(place)
        finally:
            RngState().load_state_dict(now)

    def _replayed(self, place: dict[str, Any]) -> Pass:
        """The pass at ``place``, by the first of the ways in which what is skipped is right."""
        consumed = place["consumed"]
        for way in self._ways(place):
            RngState().load_state_dict(place["begun"]["generators"])
            found = way()
            if found is not None:
                found.consumed, found.restored, found.began_in = consumed, place, Clock.ended
                return found
        raise LayoutMismatchError(
            f"{self._name()}: the first {consumed} batches of its pass are others than before the "
            f"restart{self._resized(place)}. Have the same data set and sampler as then; an order "
            "by chance has to come from generators or counters that are attributes of them"
        )

    def _ways(self, place: dict[str, Any]) -> list[Callable[[], Pass | None]]:
        """Ways to the rest of a pass, the cheapest first."""
        ways = [self._skipping, self._reading] if self._can_skip() else [self._reading]
        if place["begun"]["own"].get("stateful"):
            return [lambda w=w, a=a: w(place, a) for a in (False, True) for w in ways]  # type: ignore[misc]
        return [lambda w=w: w(place, False) for w in ways]  # type: ignore[misc]

    def _skipping(self, place: dict[str, Any], afresh: bool) -> Pass | None:
        raise NotImplementedError

    def _reading(self, place: dict[str, Any], afresh: bool) -> Pass | None:
        """Read the batches that were used, and drop them."""
        self._own.set(place["begun"]["own"], afresh=afresh)
        batches, trace = self._fresh(place)
        read(batches, place["consumed"], trace)
        return Pass(place["begun"], batches, trace) if is_right(trace, place["trace"]) else None

    def _can_skip(self) -> bool:
        return False

    def _fresh(self, place: dict[str, Any] | None = None) -> tuple[Iterator[Any], Any]:
        """A pass of the loader from its begin, and its trace; of ``place`` if it is replayed."""
        if place is not None:
            new_workers(self.loader, True)
        return iter(self.loader), BatchTrace()

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader; ConfigError where batches are read in a way that cannot repeat."""
        if self._pending is not None:
            return self._pending
        if problem := self._problem():
            raise ConfigError(f"{self._name()}: {problem}")
        state = {
            "now": self._own.now(),
            "pace": self._pace.state_dict(),
            "size": self._size(),
            "first_epochs": self._first_epochs,
        }
        if (one := self._at) is None:
            return {"begun": self._moment(), "consumed": None, "trace": None, **state}
        trace = None if one.trace is None else one.trace.value
        return {"begun": one.begun, "consumed": one.consumed, "trace": trace, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ResumableLoader; LayoutMismatchError if ranks of another number cannot share it."""
        if "trace" not in state:
            raise LayoutMismatchError(f"{self._name()} was written by another release")
        if SHARED_ANEW in state:
            state = self._shared_anew(state, *state[SHARED_ANEW])
        self._pace.load_state_dict(state["pace"])
        self._given, self._first_epochs = 0, state["first_epochs"]
        if state["consumed"] is None:
            self._between(state)
        else:
            self._pending = {**state}

    def _between(self, state: Mapping[str, Any]) -> None:
        self._epochs.set(state["begun"]["epochs"])
        self._own.set(state["begun"]["own"], between=True)
        self._stale = self._at

    def iteration_ended(self) -> None:
        """The training thread ends an iteration; ``Clock`` has counted it."""
        self._pace.iteration_ended(self._given, whole=not self._ended)
        self._spans |= bool(self._given) and self._at is not None
        self._given, self._ended = 0, False

    def _problem(self) -> str:
        """The reason why no count can say what training has used, '' if there is none."""
        if problem := self._own.problem() or self._worker_problem():
            return problem
        one, twice = self._at, self._twice
        if self._is_in_cycle():
            return f"itertools.cycle keeps the batches of the first pass: {ENDLESS}"
        if twice is not None and all(each in self._live for each in twice):
            return "two iterators read it in turn: wrap a DataLoader for each of them"
        if one is None and self._passes and Clock.ended > Clock.read + 1:
            unread = f"its pass is over, and no loader was read in this iteration: {ENDLESS}"
            if self._spans:
                return unread
            self._warn_once(f"{self._name()}: {unread}, if training uses its batches")
        if one is not None and one.thread not in (None, Clock.thread) and Clock.thread is not None:
            return (
                "another thread reads it, ahead of training: read it where you train; num_workers "
                "and prefetch_factor have workers read ahead"
            )
        if self._pace.ahead:
            return (
                f"the first iteration read {self._pace.ahead} batches more than later ones: read a "
                "batch in the iteration that uses it, and call save() in each; num_workers and "
                "prefetch_factor have workers read ahead"
            )
        if self._draws.mixed:
            return (
                "reading it draws from the generators of the process, and so does training in "
                "between: have its sampler or data set draw from a generator of its own, which is "
                "an attribute"
            )
        return ""

    def _is_in_cycle(self) -> bool:
        if Clock.ended and self._iterators:
            self._in_cycle |= in_cycle(self._iterators)
            self._iterators.clear()
        return self._in_cycle

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)

    def _worker_problem(self) -> str:
        loader = self.loader
        if not workers_of(loader):
            return ""
        if not getattr(loader, "in_order", True):
            return "in_order=False gives batches as workers finish them: set it to True"
        stays = getattr(loader, "persistent_workers", False)
        if stays and (self._own_draws_in_workers() or self._workers_are_behind()):
            return (
                "persistent workers keep the data set of the first pass, its generators and its "
                "epoch: set persistent_workers=False"
            )
        return ""

    def _own_draws_in_workers(self) -> bool:
        """True if workers draw from generators of the data set, which skipping leaves behind."""
        return bool(workers_of(self.loader) and self._own.generators_of(READERS))

    def _workers_are_behind(self) -> bool:
        """True if a data set has another epoch than when workers got it."""
        samplers = samplers_of(self.loader)
        for one, first, now in self._epochs.since(self._first_epochs):
            if first != now and all(one is not sampler for sampler in samplers):
                return True
        return False

    def _shared_anew(self, state: Mapping[str, Any], now: int, before: int) -> dict[str, Any]:
        """The position of ranks that read ``now`` batches where the old ones read ``before``."""
        kept = {key: value for key, value in state.items() if key != SHARED_ANEW}
        if now == before or kept["consumed"] is None:
            return kept
        if not any(isinstance(one, DistributedSampler) for one in samplers_of(self.loader)):
            raise LayoutMismatchError(
                f"the position of a {type(self.loader).__name__} cannot be shared by another "
                "number of ranks, because no DistributedSampler deals out its samples: give "
                "training_data to deepspeed.initialize, or start with the old number of ranks"
            )
        consumed, rest = divmod(kept["consumed"] * now, before)
        if rest:
            logger.warning(
                "the step crossed an epoch: up to %d batches a rank are read a second time", now
            )
        # Each rank has other samples now.
        return {**kept, "consumed": consumed, "trace": None, "pace": []}

    def _moment(self) -> dict[str, Any]:
        """All that decides the order of a pass that begins now."""
        return {
            "generators": RngState().state_dict(),
            "epochs": self._epochs.current(),
            "first": self._passes <= 1,
            "own": self._own.moment(),
        }

    def _next_was_asked_for(self, pending: Mapping[str, Any]) -> bool:
        # A script that knows its epoch begins the next one if it had finished this.
        return self._is_last(pending["consumed"]) and self._epochs.asks_for_next(
            pending["begun"]["epochs"]
        )

    def _size(self) -> Any:
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    def _resized(self, place: Mapping[str, Any]) -> str:
        before, now = place.get("size"), self._size()
        return f" (batches of {before} then, of {now} now)" if before != now else ""

    def _name(self) -> str:
        dataset = getattr(self.loader, "dataset", None)
        of = "" if dataset is None else f" of {type(dataset).__name__}"
        return f"the position of {type(self.loader).__name__}{of}"
