"""Objects of the process that hold training state, and are in no captured state: found once.

An average of the weights, a second optimizer, a schedule that the state mapping does not name: a
restart loses them without an error.  All objects of the process are examined by their class.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, ModuleType
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

_LIBRARIES = frozenset(
    "accelerate deepspeed deepspeed_ext megatron megatron_ft torch torchdata".split()
)
"""Packages of whose objects only those of ``_KINDS`` are examined."""


def uncaptured(
    state: Mapping[str, Any], captured: Iterable[torch.Tensor], leave_out: Iterable[str] = ()
) -> list[str]:
    """Descriptions of objects with state that is not in the mapping; empty if there are none.

    ``captured`` are the tensors that snapshots hold.  Classes that match a pattern of
    ``leave_out``, by their name with or without the module, are not reported.
    """
    known, patterns = list(captured), tuple(leave_out)
    if _found(state, known, patterns):
        gc.collect()  # an object without a holder does not count; slower than the search
        return _found(state, known, patterns)
    return []


def _found(
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
    names = set[str]()
    for kind, text in found:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not (matches(name, patterns) or matches(kind.__name__, patterns)):
            names.add(f"{name}{text}")
    return sorted(names)


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
        inner = (other for other in known if isinstance(other, torch.optim.Optimizer))
        return not any(
            one.state is other.state or one.param_groups is other.param_groups for other in inner
        )
    if isinstance(one, _BaseDataLoaderIter):
        return one._num_yielded > 0 and owners.isdisjoint(map(id, _read_by(one)))
    return not isinstance(one, torch.amp.GradScaler) or one.is_enabled()


def _read_by(reader: Any) -> list[Any]:
    """The data set and the samplers of an iterator; a traced pass stands for its loader's own."""
    sampler = reader._index_sampler
    real = sampler.traced if isinstance(sampler, TracedSampler) else sampler
    every = [reader._dataset, sampler, real, getattr(real, "sampler", None)]
    return [one for one in every if one is not None]


def _reached(values: Iterable[Any]) -> set[int]:
    """The ``id`` of what can be reached from entries other than modules and optimizers.

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
    if isinstance(one, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type | ModuleType):
        return ()
    if isinstance(one, Mapping | list | tuple | set):
        inner = one.values() if isinstance(one, Mapping) else one
        return list(inner) if len(one) <= _LONGEST else ()
    if isinstance(one, FunctionType):
        # A function that gives a state reaches what its code names.
        names = (one.__globals__.get(name) for name in one.__code__.co_names)
        cells = filter(None, map(_content, one.__closure__ or ()))
        return [*names, *cells]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    held = getattr(one, "__dict__", None)
    attributes = held.values() if isinstance(held, dict) else ()
    # A schedule knows its optimizer, and saves nothing of it.
    rest = [a for a in attributes if not isinstance(one, LRScheduler) or isinstance(a, list)]
    return [*rest, getattr(one, "__self__", None), getattr(one, "__func__", None)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are its own, and not empty; no method of it is called."""
    holders = (vars(module).get("_parameters") or {}, vars(module).get("_buffers") or {})
    every = (one for holder in holders for one in holder.values())
    return [one for one in every if one is not None and not is_empty(one)]


def _tree(module: torch.nn.Module, depth: int = 64) -> Iterator[torch.nn.Module]:
    yield module
    for child in (vars(module).get("_modules") or {}).values() if depth else ():
        if child is not None:
            yield from _tree(child, depth - 1)


def _lost_modules(every: Iterable[Any], memory: set[Place]) -> Iterator[tuple[type, str]]:
    """Modules with tensors that are not captured, the outermost of which nothing is captured."""
    modules = [one for one in every if isinstance(one, torch.nn.Module)]
    own = {id(one): tensors_of(one) for one in modules}
    lost = {
        key: [
            one for one, place in zip(tensors, places(tensors), strict=True) if place not in memory
        ]
        for key, tensors in own.items()
    }
    trees = {id(one): {id(each): each for each in _tree(one)} for one in modules}
    inside = set[int]()

    def below(one: Any, of: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        return [tensor for key in trees[id(one)] for tensor in of.get(key, ())]

    entirely = {id(one) for one in modules if len(below(one, lost)) == len(below(one, own))}
    for key in entirely:
        inside |= trees[key].keys() - {key}
    for one in modules:
        missing = below(one, lost)
        # Of others only those that hold such a tensor themselves.
        if missing and (id(one) not in inside if id(one) in entirely else lost[id(one)]):
            size = sum(one.nbytes for one in missing if one.layout is torch.strided)
            yield type(one), f" ({len(missing)} tensors, {size} bytes)"
