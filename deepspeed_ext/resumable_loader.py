"""Data loaders that continue where training stood: DeepSpeed's by themselves, others if wrapped.

Batches that were handed out count, not those that workers have read ahead; see loader_position.py.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from deepspeed_ext.loader_position import SHARED_ANEW, LoaderPosition, position_of
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.teardown import on_teardown


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

    _position: LoaderPosition
    _held: Iterator[Any] | None

    def __init__(self, loader: Any, name: str = "") -> None:
        position = loader._position if isinstance(loader, ResumableLoader) else position_of(loader)
        object.__setattr__(self, "_position", position)
        object.__setattr__(self, "_held", None)
        if not isinstance(loader, ResumableLoader):
            register(position, name)

    def __iter__(self) -> Iterator[Any]:
        begun = self._position.begin()
        if hasattr(self._position.loader, "__next__"):
            # As DeepSpeed's, which is its own iterator.
            object.__setattr__(self, "_held", begun)
        return begun

    def __next__(self) -> Any:
        if self._held is None:
            raise TypeError("call iter() on the loader, and next() on what that returns")
        return next(self._held)

    def __len__(self) -> int:
        return len(self._position.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_position", "_held"):
            raise AttributeError(name)
        return getattr(self._position.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._position.loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; about 15 KB, picklable."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there: the pass that is under way, or else the next one."""
        self._position.load_state_dict(state)


_positions: weakref.WeakValueDictionary[str, LoaderPosition] = weakref.WeakValueDictionary()
_waiting: dict[str, Mapping[str, Any]] = {}
_numbers = itertools.count()


def register(position: LoaderPosition, name: str = "") -> None:
    """Have snapshots hold its position; one that was restored before it was made is set now."""
    name = name or f"loader{next(_numbers)}"
    if name in _positions:
        raise ConfigError(f"there is a ResumableLoader named {name!r} already: name them apart")
    _positions[name] = position
    if name in _waiting:
        position.load_state_dict(_waiting.pop(name))


def _forget() -> None:
    """Number loaders anew, as a new process does."""
    global _numbers
    _positions.clear()
    _waiting.clear()
    _numbers = itertools.count()


on_teardown(_forget)

NAME = "data"
"""Name of :class:`DataPosition` among the parts of a snapshot."""

_KNOWN_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler)


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


def shared_anew(state: Mapping[str, Any], batches: tuple[int, int]) -> dict[str, Any]:
    """Positions for a rank of another number of ranks, which reads so many batches in the place of
    so many, from a state of :class:`DataPosition`."""
    return {name: {**position, SHARED_ANEW: batches} for name, position in state.items()}


class DataPosition:
    """The part of a snapshot that holds the positions of all ResumableLoaders of this rank.

    It puts one in the place of each training loader that DeepSpeed makes.  To be made before the
    script gets ``engine.training_dataloader``; a pipeline engine makes its own only later, through
    ``engine.deepspeed_io``.
    """

    def __init__(self, engine: Any) -> None:
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader

        self._engine = engine
        loader = engine.training_dataloader
        if isinstance(loader, DeepSpeedDataLoader):
            engine.training_dataloader = ResumableLoader(loader)
        if "deepspeed_io" not in vars(engine):
            # Not setattr: an engine is a Module, which looks at each value that it is given.
            vars(engine)["deepspeed_io"] = _watching(engine.deepspeed_io)

    def state_dict(self) -> dict[str, Any]:
        """Positions by name of the loader; see ResumableLoader."""
        return {name: position.state_dict() for name, position in sorted(_positions.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; those of loaders that do not exist yet wait for these to be made."""
        _waiting.clear()
        _waiting.update(state)
        for name, position in _positions.items():
            if name in _waiting:
                position.load_state_dict(_waiting.pop(name))

    def warning(self) -> str:
        """A warning for a script that has loaders of its own, '' if all are watched."""
        engine = self._engine
        loader = getattr(engine, "training_dataloader", None)
        loader = getattr(loader, "loader", loader)
        watched = isinstance(loader, ResumableLoader) or (loader is None and len(_positions))
        # Between the ends of a pipeline no stage reads.
        reads = not engine.pipeline_parallelism or engine.is_first_stage() or engine.is_last_stage()
        if watched or not reads:
            return ""
        return (
            "the position in the data is not captured: the script reads them through a loader of "
            "its own. Give training_data to deepspeed.initialize, or wrap the loader: "
            "deepspeed_ext.ResumableLoader(loader); nothing is needed where the data follow from "
            "engine.global_steps"
        )
