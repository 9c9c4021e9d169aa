"""Objects of the process that hold training state, and are in no captured state: found once.

An average of the weights, a second optimizer, a schedule that the state mapping does not name: a
restart loses them, and no error says so.  All objects of the process are looked at by their class.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from megatron_ft.trainer.coverage import Place, is_empty, matches, places
from megatron_ft.trainer.loader_trace import TracedSampler

_KINDS = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler),
    *(LRScheduler, DataLoader, _BaseDataLoaderIter),
)

_DEPTH, _LONGEST = 6, 10_000
"""Attributes and containers that are followed from an entry, one in another; and their length."""

_LIBRARIES = {"accelerate", "deepspeed", "deepspeed_ext", "megatron_ft", "torch", "torchdata"}
"""Packages whose own objects with a ``state_dict`` are looked at by kind alone."""


def uncaptured(
    state: Mapping[str, Any], captured: Iterable[torch.Tensor], leave_out: Iterable[str] = ()
) -> list[str]:
    """Descriptions of what holds state beside the mapping; empty if there is nothing.

    ``captured`` are the tensors that snapshots hold.  Classes that match a pattern of
    ``leave_out``, by their name with or without the module, are not looked at.
    """
    known, patterns = list(captured), tuple(leave_out)
    if _beside(state, known, patterns):
        gc.collect()  # what nobody holds any more is none; it takes longer than the look
        return _beside(state, known, patterns)
    return []


def _beside(
    state: Mapping[str, Any], captured: list[torch.Tensor], patterns: tuple[str, ...]
) -> list[str]:
    objects = gc.get_objects()
    kinds = set(filter(_is_candidate, {*map(type, objects)}))
    every = [one for one in objects if type(one) in kinds]
    reached = _reached(state.values())
    known = [one for one in every if id(one) in reached]
    rest = [one for one in every if id(one) not in reached]
    found = [*_lost_modules(every, set(places(captured)))]
    loaders = [one for one in known if isinstance(one, DataLoader)]
    owners = reached.union(*(map(id, (one.dataset, one._index_sampler)) for one in loaders))
    found += [(type(one), "") for one in rest if _is_lost(one, known, owners)]
    names = (f"{_name(kind)}{text}" for kind, text in found if not _is_left_out(kind, patterns))
    return sorted(set(names))


def _is_candidate(kind: type) -> bool:
    # By class: isinstance asks the object, and some make themselves when they are asked.
    module = str(getattr(kind, "__module__", ""))
    if issubclass(kind, _KINDS):
        return not module.startswith("torch.nn.modules.loss")
    if module.partition(".")[0] in _LIBRARIES or issubclass(kind, type):
        return False
    names = {name for base in kind.__mro__ for name in vars(base)}
    return {"state_dict", "load_state_dict"} <= names


def _is_lost(one: Any, known: list[Any], owners: set[int]) -> bool:
    """True for an object that no entry reaches, unless it is another one's wrapper, or off.

    ``owners`` are the ``id`` of what entries reach, and of data sets and samplers of loaders there.
    """
    if isinstance(one, torch.nn.Module | DataLoader):
        return False  # by their memory, and by what reads them
    if isinstance(one, torch.optim.Optimizer):
        return not any(_wraps(one, other) for other in known)
    if isinstance(one, _BaseDataLoaderIter):
        return one._num_yielded > 0 and owners.isdisjoint(map(id, _read_by(one)))
    return not isinstance(one, torch.amp.GradScaler) or one.is_enabled()


def _read_by(reader: Any) -> list[Any]:
    """The data set and the samplers of an iterator; a traced pass stands for its loader's own."""
    sampler = reader._index_sampler
    real = sampler.traced if isinstance(sampler, TracedSampler) else sampler
    every = [reader._dataset, sampler, real, getattr(real, "sampler", None)]
    return [one for one in every if one is not None]


def _wraps(one: Any, other: Any) -> bool:
    is_optimizer = isinstance(other, torch.optim.Optimizer)
    return is_optimizer and (one.state is other.state or one.param_groups is other.param_groups)


def _reached(values: Iterable[Any]) -> set[int]:
    """The ``id`` of what can be reached from entries that are no modules or optimizers.

    What these have in other attributes is in no snapshot.
    """
    seen = set[int]()
    layer = list(values)
    for _ in range(_DEPTH):
        fresh = [one for one in layer if id(one) not in seen]
        seen.update(map(id, fresh))
        layer = [inner for one in fresh for inner in _inside(one)]
    return seen


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type):
        return ()
    if isinstance(one, Mapping | list | tuple | set):
        inner = one.values() if isinstance(one, Mapping) else one
        return list(inner) if len(one) <= _LONGEST else ()
    owner = getattr(one, "__self__", None)
    attributes = vars(one).values() if hasattr(type(one), "__dict__") and _has_vars(one) else ()
    # A schedule knows its optimizer, and saves nothing of it.
    rest = [a for a in attributes if not isinstance(one, LRScheduler) or isinstance(a, list)]
    return [*rest, owner]


def _has_vars(one: Any) -> bool:
    try:
        return isinstance(vars(one), dict) and not isinstance(one, type(gc))
    except TypeError:
        return False


Known = tuple[torch.Tensor, bool]


def _known_of(named: Iterable[tuple[str, torch.Tensor]], memory: set[Place]) -> Iterator[Known]:
    tensors = [tensor for _, tensor in named if not is_empty(tensor)]
    for tensor, place in zip(tensors, places(tensors), strict=True):
        yield tensor, place in memory


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for holder in (vars(module).get("_parameters"), vars(module).get("_buffers")):
        yield from ((name, one) for name, one in (holder or {}).items() if one is not None)


def _lost_modules(every: Iterable[Any], memory: set[Place]) -> list[tuple[type, str]]:
    """Modules with tensors that are not captured, the outermost of which nothing is captured."""
    modules = [one for one in every if isinstance(one, torch.nn.Module)]
    known = {id(one): [known for _, known in _known_of(_own(one), memory)] for one in modules}
    children = {id(one): list((vars(one).get("_modules") or {}).values()) for one in modules}

    def all_of(module: Any, depth: int = 0) -> list[bool]:
        inner = children.get(id(module), []) if depth < 64 else []
        below = [flag for child in inner if child is not None for flag in all_of(child, depth + 1)]
        return known.get(id(module), []) + below

    whole = {id(one): all_of(one) for one in modules}
    lost = [one for one in modules if whole[id(one)] and not any(whole[id(one)])]
    inside = {id(child) for one in lost for child in children[id(one)]}
    mixed = [one for one in modules if any(whole[id(one)]) and not all(known[id(one)])]
    outermost = [one for one in lost if id(one) not in inside] + mixed
    return [_described(one, memory) for one in outermost]


def _described(module: torch.nn.Module, memory: set[Place]) -> tuple[type, str]:
    named = (pair for one in module.modules() for pair in _own(one))
    lost = [tensor for tensor, known in _known_of(named, memory) if not known]
    size = sum(one.nbytes for one in lost if one.layout is torch.strided)
    return type(module), f" ({len(lost)} tensors, {size} bytes)"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_left_out(kind: type, patterns: tuple[str, ...]) -> bool:
    return matches(_name(kind), patterns) or matches(kind.__name__, patterns)
