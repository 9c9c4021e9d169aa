"""A data loader that knows where it stands, and goes on from there in a fresh process.

What was handed out counts, not what workers have read ahead.  A position is the state of all
generators when the pass over the data began, and the number of batches since: from these the
same order is drawn again, and the batches that were used are skipped without being read.

Where training stands in its data: DeepSpeed's loaders by themselves, others if wrapped.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from deepspeed_ext.loader_kinds import EpochNumbers, Kind, kind_of, samplers_of
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.state import RngState


class ResumableLoader:
    """Stands for ``loader`` in a training loop: iterate it, ask its length, use its attributes.

    ``loader`` is a torch DataLoader, DeepSpeed's, or any iterable that gives the same batches
    in every incarnation of the job.  Make it in every incarnation, before or after
    ``load_checkpoint``; the first pass after a restore gives what is left of the interrupted one.
    ``name`` tells several apart; without names they are told apart by the order in which they are
    made.

    Skipped samples are not read, so random draws inside a worker of the data set are not
    repeated; those in the training process are part of its random state.
    """

    _tracker: Tracker
    _held: Pass | None

    def __init__(self, loader: Any, name: str = "") -> None:
        tracker = loader._tracker if isinstance(loader, ResumableLoader) else Tracker(loader)
        object.__setattr__(self, "_tracker", tracker)
        object.__setattr__(self, "_held", None)
        if not isinstance(loader, ResumableLoader):
            register(tracker, name)

    def __iter__(self) -> Iterator[Any]:
        begun = self._tracker.begin()
        if hasattr(self._tracker.loader, "__next__"):
            # As DeepSpeed's, which is its own iterator.
            object.__setattr__(self, "_held", begun)
        return begun

    def __next__(self) -> Any:
        if self._held is None:
            raise TypeError("call iter() on the loader, and next() on what that returns")
        return next(self._held)

    def __len__(self) -> int:
        return len(self._tracker.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_tracker", "_held"):
            raise AttributeError(name)
        return getattr(self._tracker.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tracker.loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; about 15 KB, picklable."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the pass that is under way, or else the next one."""
        self._tracker.load_state_dict(state)


class Tracker:
    """The position of one loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._kind: Kind = kind_of(loader)
        self._epochs = EpochNumbers(samplers_of(loader))
        # Held by the training loop; one that was dropped will not be gone on with.
        self._pass: Callable[[], Pass | None] = lambda: None
        self._passes = 0
        self._pending: dict[str, Any] | None = None

    def begin(self) -> Pass:
        """A new pass over the data, or the rest of the one that a restore brought back."""
        if self._pending is not None and self._next_was_asked_for(self._pending):
            self._kind.set_now(self.loader, self._pending["now"])
            self._pending = None
        begun = Pass(self)
        self._pass = weakref.ref(begun)
        begun.start()
        return begun

    def is_pending(self, one: Pass) -> bool:
        """True if this pass has to jump to a restored position first."""
        return self._pending is not None and one is self._pass()

    def open(self, one: Pass) -> Iterator[Any]:
        """The batches of a pass, from the restored position if there is one."""
        self._passes += 1
        if self._pending is None:
            one.begun = self.moment()
            return iter(self.loader)
        pending, self._pending = self._pending, None
        one.begun, one.consumed = pending["begun"], pending["consumed"]
        self._epochs.resume(one.begun["epochs"])
        now = RngState().state_dict()
        try:
            RngState().load_state_dict(one.begun["generators"])
            self.loader, batches = self._kind.resume(self.loader, one.begun, pending)
        finally:
            RngState().load_state_dict(now)
        return batches

    def moment(self) -> dict[str, Any]:
        """What the order of a pass that begins now depends on."""
        return {
            "generators": RngState().state_dict(),
            "epochs": self._epochs.current(),
            "first": self._passes <= 1,
            **self._kind.moment(self.loader),
        }

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader."""
        if self._pending is not None:
            return self._pending
        one = self._pass()
        if one is None or one.ended:
            begun, consumed = self.moment(), None
        else:
            begun, consumed = one.begun, one.consumed
        return {"begun": begun, "consumed": consumed, "now": self._kind.now(self.loader)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ResumableLoader."""
        if state["consumed"] is None and not self._kind.continues:
            self._epochs.set(state["begun"]["epochs"])
            self._kind.set_now(self.loader, state["now"])
        else:
            self._pending = {**state, "consumed": state["consumed"] or 0}

    def handed_out(self) -> None:
        """A batch went to training."""
        self._kind.handed_out(self.loader)

    def _next_was_asked_for(self, pending: Mapping[str, Any]) -> bool:
        # A script that knows its epoch goes on with the next one if it had finished this.
        ended = pending["consumed"] >= self._kind.length(self.loader)
        return ended and self._epochs.asks_for_next(pending["begun"]["epochs"])


class Pass:
    """One iteration over the data; counts what it hands out."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._batches: Iterator[Any] = iter(())
        self.begun: dict[str, Any] = {}
        self.consumed = 0
        self.ended = False

    def start(self) -> None:
        """Open the loader now, as ``iter`` does."""
        self._batches = self._tracker.open(self)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._tracker.is_pending(self):
            self.start()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended = True
            raise
        self.consumed += 1
        self._tracker.handed_out()
        return batch


_trackers: weakref.WeakValueDictionary[str, Tracker] = weakref.WeakValueDictionary()
_waiting: dict[str, Mapping[str, Any]] = {}
_numbers = itertools.count()


def register(tracker: Tracker, name: str = "") -> None:
    """Have snapshots hold its position; one that was restored before it was made is set now."""
    name = name or f"loader{next(_numbers)}"
    if name in _trackers:
        raise ConfigError(f"there is a ResumableLoader named {name!r} already: name them apart")
    _trackers[name] = tracker
    if name in _waiting:
        tracker.load_state_dict(_waiting.pop(name))


def positions() -> dict[str, dict[str, Any]]:
    """Of all loaders of this process, by name."""
    return {name: tracker.state_dict() for name, tracker in sorted(_trackers.items())}


def set_positions(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore them; those of loaders that do not exist yet wait for these to be made."""
    _waiting.clear()
    for name, state in states.items():
        if name in _trackers:
            _trackers[name].load_state_dict(state)
        else:
            _waiting[name] = state


NAME = "data"
"""Name of :class:`DataPosition` among the parts of a snapshot."""

_KNOWN_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler)


def watch(engine: Any) -> None:
    """Put a ResumableLoader in the place of each training loader that DeepSpeed makes.

    To be called before the script gets ``engine.training_dataloader``; a pipeline engine makes
    its own only later, through ``engine.deepspeed_io``.  A second call changes nothing.
    """
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    loader = engine.training_dataloader
    if isinstance(loader, DeepSpeedDataLoader):
        engine.training_dataloader = ResumableLoader(loader)
    if "deepspeed_io" not in vars(engine):
        # Not setattr: an engine is a Module, which looks at each value that it is given.
        vars(engine)["deepspeed_io"] = _watching(engine.deepspeed_io)


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.runtime.constants import ROUTE_TRAIN

    signature = inspect.signature(original)

    def deepspeed_io(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        sampler = given.arguments["data_sampler"]
        loader = original(*args, **kwargs)
        # A sampler of the user's own may know its position itself; he can wrap the loader.
        known = sampler is None or type(sampler) in _KNOWN_SAMPLERS
        return (
            ResumableLoader(loader) if given.arguments["route"] == ROUTE_TRAIN and known else loader
        )

    return deepspeed_io


class DataPosition:
    """The part of a snapshot that holds the positions of all ResumableLoaders of this rank."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        watch(engine)

    def state_dict(self) -> dict[str, Any]:
        """By name of the loader; see ResumableLoader."""
        return positions()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a loader that the script makes later is set when it is made."""
        set_positions(state)

    def warning(self) -> str:
        """What a script that has loaders of its own should know, '' if all are watched."""
        loader = getattr(self._engine, "training_dataloader", None)
        loader = getattr(loader, "loader", loader)
        watched = isinstance(loader, ResumableLoader) or (loader is None and positions())
        if watched or not _reads_data(self._engine):
            return ""
        return (
            "the position in the data is not captured: the script reads them through a loader of "
            "its own. Give training_data to deepspeed.initialize, or wrap the loader: "
            "deepspeed_ext.ResumableLoader(loader); nothing is needed where the data follow from "
            "engine.global_steps"
        )


def _reads_data(engine: Any) -> bool:
    # Between the ends of a pipeline no stage reads.
    stages = [getattr(engine, name, None) for name in ("is_first_stage", "is_last_stage")]
    return any(stage() for stage in stages if stage) if any(stages) else True
