"""The position of one data loader, and the rest of an interrupted pass from a fresh loader.

A position is all that decides the order of a pass when it began, and the number of batches since.
From these the same order is drawn again, and the batches that were used are skipped, without being
read where the loader's sampler can skip.  The trace of what is skipped must be that of what
was used.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch.utils.data import DistributedSampler

from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer.loader_epochs import EpochNumbers
from megatron_ft.trainer.loader_habits import Clock, Reading
from megatron_ft.trainer.loader_order import READERS, OwnState, numbered, samplers_of
from megatron_ft.trainer.loader_trace import (
    END,
    BatchTrace,
    SharedDraws,
    TracedSampler,
    first,
    tracing,
    workers_of,
)
from megatron_ft.trainer.state import RngState

logger = logging.getLogger(__name__)

awaiting_batch: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose ``reading()`` is called before a pass gives its first batch: the pass continues
from what that restores."""

SHARED_ANEW = "shared_anew"
"""Key of a position that ranks of another number take: their batches a step, and the old ones'."""


@dataclass(eq=False)
class Pass:
    """A pass over the data: all that decided its order, and what it has handed out."""

    begun: dict[str, Any]
    batches: Iterator[Any]
    trace: BatchTrace | TracedSampler
    consumed: int = 0
    began_in: int = 0
    read_in: int = -1
    thread: int | None = None
    # The place that it continues from.
    place: dict[str, Any] | None = None
    # A loader's own position, and the count and trace of batches behind it.
    own: tuple[Any, int, BatchTrace] | None = None
    ask_at: float = 0.0
    finished: bool = False


class LoaderPosition:
    """The position of any iterable that gives the same batches again.

    They are read and dropped, or skipped where ``holder``, the loader or one in it, has a sampler
    as its attribute ``sampler``, which gives ``items`` for each batch.  Generators and counters of
    the loader, its samplers and its data set are set to where the pass began.
    """

    reads_ahead = 0
    """Batches that the loader has read when it gives one, in the training process."""

    def __init__(self, loader: Any, holder: Any = None, sampler: str = "", items: int = 1) -> None:
        self.loader, self._holder = loader, loader if holder is None else holder
        self._sampler, self._items = sampler, items
        self._own = OwnState(loader)
        self._epochs, self._passes = EpochNumbers(self._numbered()), 0
        # Those when persistent workers were made.
        self._first_epochs: list[int | None] = []
        self._live: list[Pass] = []
        self._at: Pass | None = None
        # A place to continue at, from its restore until a pass is opened there.
        self._pending: dict[str, Any] | None = None
        self._draws, self._reading = SharedDraws(), Reading()
        known = {type(one).__module__.partition(".")[0] for one in samplers_of(loader)}
        self._samples_draw = not known <= {"torch", "deepspeed"} and not self.reads_ahead
        self._warned = set[str]()

    def _numbered(self) -> list[Any]:
        return numbered(self.loader)

    def new_pass(self) -> Iterator[Any]:
        """A new pass over the data, or the rest of the one that a restore brought back."""
        self._first_epochs = self._first_epochs or self._epochs.current()
        self._at = self._open()
        self._passes += 1
        self._live.append(self._at)
        batches = self._batches(self._at)
        self._reading.begins(batches)
        return batches

    def _batches(self, one: Pass) -> Iterator[Any]:
        """Count what a pass hands out; it jumps to a position that is restored meanwhile."""
        for other in [*awaiting_batch]:
            other.reading()
        try:
            while True:
                if one is self._at and self._pending is not None:
                    vars(one).update(vars(self._open()))
                batch = self._next(one)
                if batch is END:
                    one.finished = True
                    return
                self._handed_out(one, batch)
                yield batch
        finally:
            # Also when the training loop has dropped it: nobody will continue it.  At the end of
            # the process modules are empty already, and nothing is left to be counted.
            if Clock is not None:
                self._over(one)

    def _next(self, one: Pass) -> Any:
        with self._tracing(one.trace, one.place, one.consumed == 0 and self.reads_ahead > 0):
            if self._sampler and not self.reads_ahead:
                return next(one.batches, END)
            return self._draws.next(one.batches)

    def _handed_out(self, one: Pass, batch: Any) -> None:
        newer = self._at
        if newer is not one and newer in self._live and newer is not None and newer.consumed:
            self._reading.alternates(one, newer)
        self._at = one
        one.consumed += 1
        self._reading.count_batch()
        Clock.read = one.read_in = Clock.ended
        one.thread = threading.get_ident()
        one.trace.add(batch)
        if one.trace.value is None and one.consumed == 1:
            # It does not read its sampler, as some subclasses.
            self._sampler, one.trace = "", BatchTrace()
            one.trace.add(batch)

    def _over(self, one: Pass) -> None:
        self._live.remove(one)
        self._reading.ends()
        if one.finished:
            Clock.finished = Clock.ended
        if one is not self._at:
            return
        # One that was read for something else within an iteration leaves the other where it was.
        back = [p for p in self._live if p.read_in == one.began_in == Clock.ended]
        self._at = back[-1] if back else None
        # A zip() leaves a loader where another one ends.
        others_end = Clock.finished >= Clock.ended or self._is_last(one.consumed)
        consumed = None if one.place is None else one.place["consumed"]
        read_one = consumed is not None and one.consumed == consumed + 1
        if read_one and Clock.runs and one.began_in == Clock.ended and not back and not others_end:
            logger.warning(
                "%s: a pass that continued behind batch %d was left before the first save: the "
                "next one continues there. Read before load() what is not trained on",
                *(self._name(), one.consumed - 1),
            )
            self._pending = one.place

    def _is_last(self, consumed: int) -> bool:
        try:
            return bool(consumed >= len(self.loader))
        except Exception:  # nobody knows how many there are
            return False

    def _open(self) -> Pass:
        place, self._pending = self._pending, None
        if place is not None and (place.get("over") or self._next_is_asked_for(place)):
            self._pass_over(place)
            place = None
        if place is None or place["consumed"] is None:
            trace, begun = self._trace(), self._moment()
            if place is not None:
                begun["first"] = place["begun"]["first"]
            with self._tracing(trace, place, not self.reads_ahead):
                one = Pass(begun, iter(self.loader), trace, place=place)
        else:
            one = self._replayed(place)
        one.began_in = Clock.ended
        self._draws.new_pass()
        return one

    def _next_is_asked_for(self, place: Mapping[str, Any]) -> bool:
        # A script that knows its epoch begins the next one if it had finished this.
        consumed, epochs = place["consumed"], place["begun"]["epochs"]
        done = consumed is not None and self._is_last(consumed)
        return done and self._epochs.asks_for_next(epochs)

    def _pass_over(self, place: Mapping[str, Any]) -> None:
        self._own.set(place["now"], between=True)

    def _replayed(self, place: dict[str, Any]) -> Pass:
        """The pass at ``place``, by the first of the ways in which what is skipped is right."""
        self._epochs.resume(place["begun"]["epochs"])
        now = RngState().state_dict()
        try:
            for way in self._ways(place):
                RngState().load_state_dict(place["begun"]["generators"])
                if (found := way()) is not None:
                    found.consumed, found.place = place["consumed"], place
                    return found
        finally:
            RngState().load_state_dict(now)
        size = place.get("size"), self._size()
        resized = " (batches of {} then, of {} now)".format(*size) if size[0] != size[1] else ""
        raise LayoutMismatchError(
            f"{self._name()}: the first {place['consumed']} batches of its pass are others than "
            f"before the restart{resized}. Have the same data set and sampler as then; a "
            "random order has to come from generators or counters that are attributes of them"
        )

    def _ways(self, place: dict[str, Any]) -> list[Callable[[], Pass | None]]:
        """Ways to the rest of a pass, the cheapest first."""
        # Draws of workers, and of a batch that was read ahead, would be left out.
        drawn_ahead = self._own.generators_of(READERS) and (
            workers_of(self.loader) or self.reads_ahead
        )
        skips = (True, False) if self._sampler and not drawn_ahead else (False,)
        afresh = (False, True) if place["begun"]["own"].get("stateful") else (False,)
        return [partial(self._replay, place, *how) for how in product(afresh, skips)]

    def _replay(self, place: dict[str, Any], afresh: bool, skips: bool) -> Pass | None:
        """Repeat a pass: skip in the sampler what was used, or read it.  None if it was other."""
        consumed = place["consumed"]
        reads = min(consumed, self.reads_ahead) if skips else consumed
        self._own.set(place["begun"]["own"], afresh=afresh)
        trace = self._trace(consumed - reads)
        with self._tracing(trace, place, reads > 0 or not self.reads_ahead):
            batches = iter(self.loader)
            for batch in first(batches, reads):
                trace.add(batch)
        if skips and consumed and isinstance(trace, TracedSampler):
            # As before: torch draws a seed for workers, and then the sampler its order.
            trace.start()
            if not workers_of(self.loader):
                # Skipped samples were not read, and draws of the data set were left out.
                self._own.set(place["now"])
        right = place["trace"] in (None, trace.value)
        return Pass(place["begun"], batches, trace) if right else None

    def _trace(self, skip: int = 0) -> BatchTrace | TracedSampler:
        if not self._sampler:
            return BatchTrace()
        draws = self._draws if self._samples_draw else None
        sampler = vars(self._holder)[self._sampler]
        return TracedSampler(sampler, skip * self._items, self._items, draws)

    def _tracing(
        self, trace: Any, place: dict[str, Any] | None, begins: bool
    ) -> AbstractContextManager[None]:
        """Around what begins to read: one that reads ahead does so as it gives its first batch."""
        if not begins:
            return nullcontext()
        return tracing(self._holder, self._sampler, trace, place)

    def _moment(self) -> dict[str, Any]:
        """All that decides the order of a pass that begins now."""
        return {
            "generators": RngState().state_dict(),
            "epochs": self._epochs.current(),
            "first": not self._passes,
            "own": self._own.moment(),
        }

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader; ConfigError where batches are read in a way that cannot repeat."""
        if self._pending is not None:
            return self._pending
        if problem := self._problem():
            raise ConfigError(f"{self._name()}: {problem}")
        one = self._at
        return {
            "begun": self._moment() if one is None else one.begun,
            "consumed": None if one is None else one.consumed,
            "trace": None if one is None else one.trace.value,
            "now": self._own.now(),
            "pace": self._reading.pace(),
            "size": self._size(),
            "sampler": self._sampler,
            "first_epochs": self._first_epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ResumableLoader; LayoutMismatchError if ranks of another number cannot share it."""
        if "sampler" not in state:
            raise LayoutMismatchError(f"{self._name()} was written by another release")
        if SHARED_ANEW in state:
            state = self._shared_anew(state, *state[SHARED_ANEW])
        self._reading.restarts(state["pace"])
        self._first_epochs = state["first_epochs"]
        self._pending = {**state}
        self._sampler = self._sampler if state["sampler"] else ""
        if state["consumed"] is None:
            self._epochs.set(state["begun"]["epochs"])
            self._own.set(state["begun"]["own"], between=True)

    def iteration_ended(self) -> None:
        self._reading.iteration_ended(in_pass=self._at is not None)

    def _problem(self) -> str:
        """The reason why no count can say what training has used, '' if there is none."""
        if problem := self._own.problem():
            return problem
        if workers_of(self.loader):
            if not getattr(self.loader, "in_order", True):
                return "in_order=False gives batches as workers finish them: set it to True"
            stays = getattr(self.loader, "persistent_workers", False)
            if stays and (self._own.generators_of(READERS) or self._workers_are_behind()):
                return (
                    "persistent workers keep the data set of the first pass, its generators and "
                    "its epoch: set persistent_workers=False"
                )
        problem = self._reading.problem(self._at, self._live, self._passes, self._warn_once)
        if not problem and self._draws.draws and self._draws.others:
            return (
                "reading it draws from the generators of the process, and so does training in "
                "between: have its sampler or data set draw from a generator of its own, which is "
                "an attribute"
            )
        return problem

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s: %s", self._name(), text)

    def _workers_are_behind(self) -> bool:
        """True if a data set has another epoch than when workers got it."""
        samplers = {*map(id, samplers_of(self.loader))}
        epochs = self._epochs.since(self._first_epochs)
        return any(a != b for one, a, b in epochs if id(one) not in samplers)

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

    def _size(self) -> Any:
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    def _name(self) -> str:
        dataset = getattr(self.loader, "dataset", None)
        of = "" if dataset is None else f" of {type(dataset).__name__}"
        return f"the position of {type(self.loader).__name__}{of}"
