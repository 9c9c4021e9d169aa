"""Everything but the process's generators that decides the order of a pass over the data.

A loader, its samplers and its data set may own generators, count their passes, or have a
``state_dict``.  All of it is read when a pass begins, and set again before the pass is repeated.
"""

from __future__ import annotations

import copy
import functools
import random
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.objects import PLAIN
from megatron_ft.trainer.in_place import filled

MOST_OBJECTS, MOST_DEPTH, MOST_ITEMS = 4000, 8, 64
"""Limits of the search for state: objects, attributes of attributes, items of a container."""

SMALL_ITEMS = 4096
"""A container or array of a sampler up to this length is kept where passes change it."""

READERS = ("dataset", "collate_fn", "worker_init_fn")
"""Parts of a loader that are at work as samples are read."""

_GENERATORS = (
    *(torch.Generator, random.Random, np.random.Generator, np.random.RandomState),
    *(np.random.BitGenerator, np.random.SeedSequence),
)
_LEAVES = (
    *(*PLAIN, torch.Tensor, torch.nn.Module, np.ndarray, types.ModuleType, type),
    *(np.generic, types.BuiltinFunctionType),
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_DENSE = ("cpu", torch.strided)
_LIBRARIES = frozenset({"accelerate", "builtins", "datasets", "deepspeed", "numpy", "torch"})


class _Long(int):
    """A hash in the place of a long list or array."""


class OwnState:
    """The state of all that a loader is made of: generators, counters, ``state_dict``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._look()
        self._initial = self._newest = self._attributes(long=True)
        self._fresh = self._stateful()

    def _look(self) -> None:
        """Find the generators, and the samplers and data sets of the user's own."""
        shared = (random._inst, np.random.mtrand._rand, torch.default_generator)
        self._generators: dict[str, Any] = {}
        self._holders: dict[str, Any] = {}
        self._counting: dict[str, Any] = {}
        for path, one in _below(self._loader):
            if isinstance(one, _GENERATORS):
                if all(one is not other for other in shared):
                    self._generators[path] = getattr(one, "bit_generator", one)
                continue
            kind = type(one)
            gives_items = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
            if gives_items and not isinstance(one, DataLoader):
                if one is not self._loader and _has_methods(one, "state_dict", "load_state_dict"):
                    self._holders[path] = one
                # Samplers and data sets of the user's own may count their passes.
                if kind.__module__.partition(".")[0] not in _LIBRARIES:
                    self._counting[path] = one

    def moment(self) -> dict[str, Any]:
        self._look()
        self._newest = self._attributes(long=True)
        return {**self._changed(self._newest), "stateful": self._stateful()}

    def now(self) -> dict[str, Any]:
        """Everything that may have changed within the pass: generators and plain attributes."""
        return self._changed(self._attributes())

    def _changed(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """States of generators, and attributes that are not as when the loader was made."""
        missing = object()
        return {
            "generators": {
                path: _generator_state(one)
                for path, one in self._generators.items()
                if not isinstance(one, random.SystemRandom)
            },
            "attributes": {
                path: value
                for path, value in attributes.items()
                if not isinstance(value, _Long)
                and not _equal(self._initial.get(path, missing), value)
            },
        }

    def _stateful(self) -> dict[str, Any]:
        return {path: copy.deepcopy(one.state_dict()) for path, one in self._holders.items()}

    def _attributes(self, *, long: bool = False) -> dict[str, Any]:
        """Plain values of samplers and data sets by path; with ``long``, lists and arrays too."""
        found = {}
        for path, one in self._counting.items():
            bulky = long and not hasattr(type(one), "__getitem__")
            for name, value in _named(one).items():
                if hasattr(one, "set_epoch") and "epoch" in name:
                    continue
                if type(value) in PLAIN:
                    found[f"{path}.{name}"] = value
                elif bulky and (kept := _bulk(value)) is not None:
                    found[f"{path}.{name}"] = kept
        return found

    def set(self, state: Mapping[str, Any], *, afresh: bool = False, between: bool = False) -> None:
        """Set what ``moment`` or ``now`` gave.

        ``afresh``: objects with a ``state_dict`` are as they were made instead.  ``between``: no
        pass is under way; a data set's own position would be the end of the last one.
        """
        self._look()
        stateful = self._fresh if afresh else state.get("stateful", {})
        for path, value in stateful.items():
            if path in self._holders and not (between and "dataset" in path.split(".")):
                self._holders[path].load_state_dict(copy.deepcopy(value))
        for path, value in state["attributes"].items():
            owner, _, name = path.rpartition(".")
            if owner in self._counting:
                one = self._counting[owner]
                changed = filled(getattr(one, name, None), copy.deepcopy(value))
                object.__setattr__(one, name, changed)
        for path, value in state["generators"].items():
            if path not in self._generators:
                raise LayoutMismatchError(
                    f"the snapshot holds the generator {path} of a data loader, which this process "
                    "does not have: make it before the loader, and under the same name"
                )
            _set_generator(self._generators[path], value)

    def generators_of(self, parts: Sequence[str]) -> list[str]:
        """The generators that the loader's ``parts`` own, such as "dataset"."""
        return [one for one in self._generators if {*re.split(r"[.:\[]", one)} & {*parts}]

    def problem(self) -> str:
        """The reason why a pass cannot be repeated, '' if none is known."""
        for path, one in self._generators.items():
            if isinstance(one, random.SystemRandom):
                return f"{path} draws from the operating system, whose numbers cannot be repeated"
        for path, value in self._newest.items():
            if isinstance(value, _Long) and value != self._initial.get(path):
                return (
                    f"passes change {path}, which is too long to be kept: draw the order anew in "
                    "each pass, from a generator or a seed"
                )
        return ""


def _below(loader: Any) -> Iterator[tuple[str, Any]]:
    """All objects below a loader with a path to each, the nearest first."""
    seen: dict[int, Any] = {}
    left: deque[tuple[str, Any, int]] = deque([(type(loader).__name__, loader, 0)])
    while left and len(seen) < MOST_OBJECTS:
        path, one, depth = left.popleft()
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        if hasattr(type(one), "__next__") and one is not loader:
            continue  # an iterator under way
        if type(one).__module__.startswith("megatron_ft.") and one is not loader:
            continue
        seen[id(one)] = one  # keeps it, and so its id
        yield path, one
        # Accelerate's seedable sampler makes and seeds a generator of its own in every pass.
        # A stream of Hugging Face copies its generator in every pass.
        leaf = isinstance(one, _GENERATORS) or type(one).__module__ == "datasets.iterable_dataset"
        if depth < MOST_DEPTH and not leaf:
            named = [*_parts(one)]
            if hasattr(one, "initial_seed"):
                named = [(n, part) for n, part in named if n != ".generator"]
            left.extend((f"{path}{name}", part, depth + 1) for name, part in named)


def _parts(one: Any) -> Iterable[tuple[str, Any]]:
    """The parts of an object, each with the end of its path."""
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, types.MethodType):
        return ((".__self__", one.__self__), *_of_function(one.__func__))
    if isinstance(one, functools.partial):
        return ((".func", one.func), (".args", one.args), (".keywords", one.keywords))
    held: list[tuple[str, Any]] = []
    if isinstance(one, Mapping | list | tuple | set | frozenset | deque):
        items = one.items() if isinstance(one, Mapping) else enumerate(one)
        held = [(f"[{key!r}]", v) for key, v in items] if len(one) <= MOST_ITEMS else []
    held += [(f".{name}", value) for name, value in _named(one).items()]
    for kind in type(one).__mro__:
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            for value in vars(kind).values():
                if isinstance(value, types.FunctionType):
                    held += _of_function(value)
                elif isinstance(value, _GENERATORS):
                    held.append((f".{kind.__name__}.generator", value))
    return held


def _named(one: Any) -> dict[str, Any]:
    found: dict[str, Any] = {**getattr(one, "__dict__", {})}
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                found[name] = getattr(one, name)
    return found


def _of_function(function: Any) -> list[tuple[str, Any]]:
    """The values that a function has closed over, and generators among the global names it uses."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            found.append((f".{name}", cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    found += [(f".default{i}", value) for i, value in enumerate(function.__defaults__ or ())]
    used = ((name, function.__globals__.get(name)) for name in code.co_names)
    return found + [(f"::{name}", v) for name, v in used if isinstance(v, _GENERATORS)]


def _has_methods(one: Any, *names: str) -> bool:
    return all(callable(getattr(type(one), name, None)) for name in names)


def _bulk(value: Any) -> Any:
    """A copy of a small container or array, a hash of a large one, None for all else."""
    if type(value) in _CONTAINERS:
        leaves = [*islice(_leaves(value), SMALL_ITEMS + 1)]
        if not PLAIN.issuperset(map(type, leaves)):
            return None
        return copy.deepcopy(value) if len(leaves) <= SMALL_ITEMS else _Long(hash(repr(value)))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy() if value.size <= SMALL_ITEMS else _Long(hash(value.tobytes()))
    if type(value) is torch.Tensor and (value.device.type, value.layout) == _DENSE:
        kept = value.detach().clone()
        data = kept.contiguous().view(-1).view(torch.uint8).numpy()
        return kept if kept.numel() <= SMALL_ITEMS else _Long(hash(data.tobytes()))
    return None


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    if type(value) not in _CONTAINERS or depth == MOST_DEPTH:
        yield value
        return
    for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
        yield from _leaves(inner, depth + 1)


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | torch.Tensor):
        return left.shape == right.shape and bool((left == right).all())
    return bool(left == right)


def _generator_state(one: Any) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.BitGenerator):
        return one.state, _children(one)
    if isinstance(one, np.random.SeedSequence):
        return one.n_children_spawned
    return (
        one.get_state(legacy=False) if isinstance(one, np.random.RandomState) else one.get_state()
    )


def _children(one: Any) -> int:
    return int(getattr(getattr(one, "seed_seq", None), "n_children_spawned", 0))


def _set_generator(one: Any, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif isinstance(one, np.random.BitGenerator):
        one.state, children = state
        if children:
            _set_generator(one.seed_seq, children)
    elif isinstance(one, np.random.SeedSequence):
        if state < one.n_children_spawned:
            raise LayoutMismatchError("a SeedSequence of a data loader was spawned before load()")
        one.spawn(state - one.n_children_spawned)
    else:
        one.set_state(state)


def numbered(loader: Any) -> list[Any]:
    return [o for _, o in _below(loader) if o is not loader and _has_methods(o, "set_epoch")]


def samplers_of(loader: Any) -> list[Any]:
    """All samplers of a loader, and those in them, from the outermost on."""
    found: dict[int, Any] = {}
    left = [loader]
    while left:
        names = ("data_sampler", "sampler", "batch_sampler")
        inner = [getattr(one, name, None) for one in left for name in names]
        left = [one for one in inner if one is not None and id(one) not in found]
        found.update({id(one): one for one in left})
    return [*found.values()]
