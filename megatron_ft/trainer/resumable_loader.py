"""Data loaders that continue where training stood.

Batches that were handed out count, not those that workers have read ahead; see loader_position.py.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.loader_habits import Clock
from megatron_ft.trainer.loader_position import LoaderPosition
from megatron_ft.trainer.loader_trace import sampler_name
from megatron_ft.trainer.own_position import OwnPosition
from megatron_ft.trainer.teardown import on_teardown


class ResumableLoader:
    """Stands for ``loader`` in a training loop: iterate it, ask its length, use its attributes.

    ``loader`` is a torch DataLoader, DeepSpeed's, or any iterable that gives the same batches
    in every incarnation of the job.  Make it in every incarnation, before or after the
    restore; the first pass behind that gives what is left of the interrupted one.
    ``name`` distinguishes several; without names their order of creation does.

    The loader counts what it hands out, and checks after a restart that what it skips is what was
    used; LayoutMismatchError says if it is not.  Generators and counters that are attributes of
    its samplers and data set are restored.  Where a count cannot follow how the loader is read,
    as in ``itertools.cycle``, ``state_dict``, and so the first save, raises ConfigError.

    Skipped samples are not read, so draws of a worker from its process's generators are not
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
        begun = self._position.new_pass()
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


def position_of(loader: Any) -> LoaderPosition:
    deepspeed = sys.modules.get("deepspeed.runtime.dataloader")
    if deepspeed is not None and isinstance(loader, deepspeed.DeepSpeedDataLoader):
        items = 1 if loader.curriculum_learning_enabled else loader.batch_size
        return LoaderPosition(loader, sampler="data_sampler", items=items)
    # Accelerate's loaders always have the methods, but these work only if this is true.
    calls = [getattr(loader, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, calls)) and getattr(loader, "use_stateful_dataloader", True):
        return OwnPosition(loader)
    iterates_itself = type(loader).__iter__ is not DataLoader.__iter__
    return LoaderPosition(loader, sampler="" if iterates_itself else sampler_name(loader))


registered: weakref.WeakValueDictionary[str, LoaderPosition] = weakref.WeakValueDictionary()
"""The positions of all loaders of this process, by name."""

_waiting: dict[str, Mapping[str, Any]] = {}
_numbers = itertools.count()


def register(position: LoaderPosition, name: str = "") -> None:
    """Have snapshots hold its position; one that was restored before it was made is set now."""
    name = name or f"loader{next(_numbers)}"
    if name in registered:
        raise ConfigError(f"there is a ResumableLoader named {name!r} already: name them apart")
    registered[name] = position
    if name in _waiting:
        position.load_state_dict(_waiting.pop(name))


def positions() -> dict[str, Any]:
    return {name: position.state_dict() for name, position in sorted(registered.items())}


def set_positions(state: Mapping[str, Any]) -> None:
    """Restore them; those of loaders that do not exist yet wait for these to be made."""
    _waiting.clear()
    _waiting.update(state)
    for name, position in registered.items():
        if name in _waiting:
            position.load_state_dict(_waiting.pop(name))


def iteration_ended() -> None:
    """The training thread ends an iteration: loaders count their batches by it."""
    Clock.ended, Clock.thread = Clock.ended + 1, threading.get_ident()
    for position in [*registered.values()]:
        position.iteration_ended()


def _forget() -> None:
    """Number loaders and iterations anew, as a new process does."""
    global _numbers
    Clock.runs, Clock.ended, Clock.thread = False, 0, None
    Clock.read = Clock.finished = -1
    registered.clear()
    _waiting.clear()
    _numbers = itertools.count()


on_teardown(_forget)
