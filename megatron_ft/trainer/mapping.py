"""The public ``state`` mapping, as a TrainingState.

One pass finds the tensors in a mapping of names to tensors, DTensors, modules, optimizers, other
objects with ``state_dict``, and small values.  The pass is made again at each iteration boundary:
any of these objects may hold other tensors than last time without being another object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError, LayoutMismatchError, StateMismatchError
from megatron_ft.core.objects import PLAIN, Part, decode, encode
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.addresses import DENSE
from megatron_ft.trainer.dtensor_places import dtensor_places
from megatron_ft.trainer.optimizer_load import exact_loads, load_optimizer, parameters
from megatron_ft.trainer.optimizer_places import StatePlaces, has_device
from megatron_ft.trainer.replicas import groups_of_wrapped
from megatron_ft.trainer.state import RngState, TrainingState

logger = logging.getLogger(__name__)

SMALL_BYTES = 16384
"""Tensors of unknown Stateful objects up to this size travel with the small objects: a
data loader's may change their shape, which no planned layout could hold."""

COUNTER_BYTES = 4096
"""Plain tensors up to this size are secured at the boundary: likely counters."""

_KIND, _LENGTH = attrgetter("layout", "is_nested"), attrgetter("nbytes")
_STRIDED = {(torch.strided, False)}
_NAMES = "names"
_STRUCTURES = "structures"
_OWN = "own"
"""Names of the mapping's entries that a load leaves as they are."""
_PLACES = "places"
"""Tensors of optimizers that lie elsewhere than usual; not written where there are none."""


@dataclass
class Enumeration:
    """One pass over a state mapping.

    ``structures`` holds, per name of the mapping, what has to be encoded beside the
    tensors; ``name_of`` says by ``id`` which tensor inside them is stored under which
    name; ``handles`` gives the user's own object (a DTensor, not its local shard), and
    ``all_plain`` says that they are no subclasses.
    """

    lazy: dict[str, torch.Tensor] = field(default_factory=dict)
    boundary: dict[str, torch.Tensor] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, torch.Tensor] = field(default_factory=dict)
    all_plain: bool = True

    @cached_property
    def name_of(self) -> dict[int, str]:
        """The name of each tensor by its ``id``, of several the first; of a finished pass."""
        names, tensors = reversed(self.handles.keys()), reversed(self.handles.values())
        return dict(zip(map(id, tensors), names, strict=True))

    @cached_property
    def wrapped(self) -> dict[str, torch.Tensor]:
        """The tensors whose insides are stored, by name; of a finished pass."""
        if {*map(type, self.handles.values())} <= DENSE:
            return {}
        return {
            n: tensor for n, tensor in self.handles.items() if local_tensor(tensor) is not tensor
        }

    def put(self, name: str, tensor: torch.Tensor, lazy: bool) -> None:
        """Register a tensor under a name that must be new."""
        if name in self.handles:
            raise ConfigError(f"two tensors of the state are called {name!r}; rename one of them")
        self.handles[name] = tensor
        self.all_plain &= type(tensor) in DENSE
        (self.lazy if lazy else self.boundary)[name] = local_tensor(tensor)

    def put_all(self, names: list[str], tensors: list[torch.Tensor], lazy: bool) -> None:
        """As ``put`` of each, in few calls: there may be thousands."""
        if not self.handles.keys().isdisjoint(names) or len({*names}) < len(names):
            for name, tensor in zip(names, tensors, strict=True):
                self.put(name, tensor, lazy)
        self.handles.update(zip(names, tensors, strict=True))
        plain = {*map(type, tensors)} <= DENSE
        self.all_plain &= plain
        local = tensors if plain else map(local_tensor, tensors)
        (self.lazy if lazy else self.boundary).update(zip(names, local, strict=True))

    def put_plain(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        """Register tensors of a mapping that holds nothing else, as ``enumerate_entry`` would."""
        if {*map(_KIND, tensors)} <= _STRIDED:
            long = list(map(COUNTER_BYTES.__lt__, map(_LENGTH, tensors)))
        else:
            long = [_is_longer(tensor, COUNTER_BYTES) for tensor in tensors]
        for lazy in (True, False):
            chosen = [is_long is lazy for is_long in long]
            self.put_all(list(compress(names, chosen)), list(compress(tensors, chosen)), lazy)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that lies on this rank; any other tensor as it is."""
    if type(tensor) in DENSE:
        return tensor
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor


def is_stateful(value: Any) -> bool:
    """True for the Stateful protocol of torch.distributed.checkpoint."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_optimizer(value: Any) -> bool:
    """True for torch's optimizers and wrappers that look like one."""
    return is_stateful(value) and hasattr(value, "param_groups") and hasattr(value, "step")


def enumerate_entry(found: Enumeration, name: str, value: Any) -> None:
    """Enumerate one entry of a state mapping.

    Lazily copied: parameters of modules, everything of optimizers, plain tensors that
    are no counters.  At the boundary: buffers, and whatever else has a state_dict.
    """
    if isinstance(value, torch.Tensor):
        found.put(name, value, _is_longer(value, COUNTER_BYTES))
    elif isinstance(value, torch.nn.Module):
        _module(found, name, value)
    elif is_optimizer(value):
        enumerate_structure(found, name, value.state_dict(), True)
    elif is_stateful(value):
        enumerate_structure(found, name, value.state_dict(), False, inline=SMALL_BYTES)
    else:
        enumerate_structure(found, name, value, None)


def _is_longer(tensor: torch.Tensor, length: int) -> bool:
    """True if the tensor has more bytes, or is not dense, which a plan refuses."""
    return tensor.layout != torch.strided or tensor.is_nested or tensor.nbytes > length


def _module(found: Enumeration, name: str, module: torch.nn.Module) -> None:
    """Enumerate a module; its structure is kept only if it has extra state."""
    content = module.state_dict(keep_vars=True)
    tensors = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
    parameters = {key for key, value in tensors.items() if _is_parameter(value)}
    for lazy in (True, False):
        keys = [key for key in tensors if (key in parameters) is lazy]
        found.put_all([f"{name}/{key}" for key in keys], [tensors[key] for key in keys], lazy)
    if len(tensors) < len(content):
        found.structures[name] = dict(content)


def _is_parameter(tensor: torch.Tensor) -> bool:
    # torch's isinstance asks in Python whether another class counts as one.
    return type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter)


def enumerate_structure(
    found: Enumeration, name: str, value: Any, lazy: bool | None, inline: int = -1
) -> None:
    """Enumerate nested containers; tensors of at most ``inline`` bytes stay with it."""
    found.structures[name] = value
    names, tensors = list[str](), list[torch.Tensor]()
    pending: list[tuple[str, Any]] = [("", {name: value})]
    while pending:
        path, container = pending.pop()
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, item in items:
            if isinstance(item, torch.Tensor):
                names.append(f"{path}{key}")
                tensors.append(item)
            elif isinstance(item, Mapping):
                pending.append((f"{path}{key}/", item))
            elif isinstance(item, list | tuple):
                if not PLAIN.issuperset(map(type, item)):
                    pending.append((f"{path}{key}/", item))
            elif type(item) not in PLAIN and is_stateful(item):
                raise ConfigError(
                    f"{path}{key} ({type(item).__name__}) has a state_dict but lies inside another "
                    "value; put it into the state mapping under a name of its own"
                )
    if inline >= 0:
        kept = [_is_longer(tensor, inline) for tensor in tensors]
        names, tensors = list(compress(names, kept)), list(compress(tensors, kept))
    if lazy is not None:
        return found.put_all(names, tensors, lazy)
    for one, tensor in zip(names, tensors, strict=True):
        found.put(one, tensor, _is_longer(tensor, COUNTER_BYTES))


class MappingState:
    """Adapts names to tensors, DTensors, Stateful objects and small values (core.objects.encode).

    Loads are in place: tensors keep their identity, dicts and lists are updated,
    Stateful objects get ``load_state_dict``, other values replace the mapping's own,
    which must then be mutable.  ``replicated`` maps prefixes of tensor names to the
    process group whose ranks hold equal values.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        replicated: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is read yet; refresh() does."""
        self._state = state
        self._replicated = dict(replicated or {})
        self._found: Enumeration | None = None
        self._adopted: dict[str, torch.Tensor] = {}
        self._placed: tuple[list[str], dict[str, Any]] = [], {}

    def adapts(self, state: Any) -> bool:
        """True if this is the adapter of that very mapping."""
        return self._state is state

    def refresh(self) -> None:
        """Enumerate the mapping as it is now."""
        self._found, found = None, Enumeration()
        tensors = list(self._state.values())
        if {*map(type, tensors)} <= DENSE:
            found.put_plain(list(self._state), tensors)
        else:
            for name, value in self._state.items():
                enumerate_entry(found, name, value)
        self._found = found

    def forget_tensors(self) -> None:
        """Let go of what was enumerated, until it is asked for."""
        self._found = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, optimizer tensors, plain tensors; see enumerate_entry."""
        return self._current().lazy

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Buffers and tensors of other Stateful objects; see enumerate_entry."""
        return self._current().boundary

    def objects(self) -> dict[str, Any]:
        """All else, encoded, with stored tensors replaced by their names."""
        found = self._current()
        columns = self._moments(found)

        def stored(part: Any) -> Part | None:
            # The enumeration keeps all of these alive, so no other object has one of these ids.
            name = found.name_of.get(id(part))
            return columns.get(id(part)) if name is None else Part(name)

        objects = {_NAMES: sorted(self._state), _STRUCTURES: encode(found.structures, stored)}
        places = self._unusual_places(found)
        return {**objects, _PLACES: places} if places else objects

    def _unusual_places(self, found: Enumeration) -> dict[str, Any]:
        """What a load has to know of optimizers' tensors; looked up anew if there are others."""
        if found.all_plain and not has_device():
            return {}
        names = list(found.handles)
        if names != self._placed[0]:
            made: dict[str, Any] = {}
            for places in self._optimizer_places().values():
                made |= places.exceptions(found.handles)
            self._placed = names, made
        return self._placed[1]

    def _optimizer_places(self) -> dict[str, StatePlaces]:
        every = self._state.items()
        return {name: StatePlaces(name, value) for name, value in every if is_optimizer(value)}

    def replicas(self) -> dict[str, Any]:
        """The lazily copied tensors below the declared prefixes, with their groups."""
        if not self._replicated:
            return {}
        groups = ((name, self.replica_group(name)) for name in self.tensors())
        return {name: group for name, group in groups if group is not None}

    def wrapped(self) -> dict[str, torch.Tensor]:
        """DTensors, whose shards are stored."""
        return self._current().wrapped

    def optimizer_of(self, names: Sequence[str]) -> str:
        """The first optimizer that has one of these tensors among its parameters or its state."""
        handles = self._current().handles
        tensors = {id(handles[name]) for name in names if name in handles}
        for entry, value in self._state.items():
            if is_optimizer(value) and (
                any(name.startswith(f"{entry}/") for name in names)
                or not tensors.isdisjoint(map(id, parameters(value)))
            ):
                return f"{entry!r} ({type(value).__name__})"
        return ""

    def compared(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """Parameters below DistributedDataParallel, and the state of optimizers of these alone."""
        groups = groups_of_wrapped(self._state)
        return {
            name: (tensor, group)
            for name, tensor in self.tensors().items()
            if (group := groups.get(name.partition("/")[0])) is not None
        }

    def replica_group(self, name: str) -> Any:
        """The group declared for a prefix of ``name``, or None."""
        for prefix, group in self._replicated.items():
            if name == prefix or name.startswith(prefix.rstrip("/") + "/"):
                return group
        return None

    def logical_map(self) -> dict[str, LogicalPlace]:
        """Places of DTensors in their whole, which goes by the same name."""
        return dtensor_places(self._current().handles).places

    def expect_reshape(self) -> None:
        """Create the moments of optimizers; LayoutMismatchError if a DTensor has no place."""
        for name, value in self._state.items():
            if isinstance(value, torch.optim.Optimizer):
                self._create_moments(name, value)
        self._found = None
        problems = dtensor_places(self._current().handles).problems
        if problems:
            name, reason = min(problems.items())
            raise LayoutMismatchError(
                f"{len(problems)} DTensors cannot come from a snapshot of another layout, {name} "
                f"first: {reason}; start with the old number of ranks"
            )

    @staticmethod
    def _create_moments(name: str, optimizer: torch.optim.Optimizer) -> None:
        try:
            master_tensors.create_missing(optimizer)
        except ConfigError as error:
            raise StateMismatchError(
                f"{name} has no moments yet for those of another layout: {error}"
            ) from error

    def reshape_objects(
        self, shard_id: str, origins: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        """The objects of the same shard, or of the nearest without its random states."""
        for name, objects in origins:
            if name == shard_id:
                return objects
        name, objects = origins[0]
        own = sorted(key for key, value in self._state.items() if isinstance(value, RngState))
        logger.warning(
            "%s was not in the snapshot's layout: %s begin as the program has seeded them, all "
            "else is as on %s",
            shard_id,
            ", ".join(own) or "no random states",
            name,
        )
        return {**objects, _OWN: own}

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors that an object will create when it loads, such as Adam's moments."""
        for name in tensors:
            owner = self._state.get(name.split("/", 1)[0])
            if owner is None or isinstance(owner, (torch.nn.Module, torch.Tensor)):
                raise LayoutMismatchError(
                    f"the snapshot holds {name}, the state to load into has no such tensor; "
                    "build the same model before you load"
                )
        self._adopted = dict(tensors)

    def replaces(self, name: str) -> bool:
        """True for the state of an optimizer, whatever a fresh one holds in its place."""
        owner, _, rest = name.partition("/")
        return rest.startswith("state/") and is_optimizer(self._state.get(owner))

    def load(self, objects: dict[str, Any]) -> None:
        """Hand every object its state; raises LayoutMismatchError if names differ."""
        handles = {**self._current().handles, **self._made(objects.get(_PLACES, {}))}
        differing = sorted(set(objects[_NAMES]) ^ set(self._state))
        if differing:
            raise LayoutMismatchError(
                f"the state mapping and the snapshot differ in {', '.join(differing)}; "
                "load with the mapping that save() is called with"
            )
        own = objects.get(_OWN, ())
        for name, value in decode(objects[_STRUCTURES], _taken_from(handles)).items():
            if name not in own:
                self._load_one(name, value)
        self._adopted, self._found = {}, None

    def _made(self, exceptions: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The adopted tensors, those of optimizers where they lay when they were saved."""
        made = dict(self._adopted)
        for places in self._optimizer_places().values():
            made |= places.placed(self._adopted, exceptions)
        return made

    def _load_one(self, name: str, value: Any) -> None:
        target = self._state[name]
        if is_optimizer(target):
            load_optimizer(name, target, value)
        elif is_stateful(target):
            with exact_loads():
                target.load_state_dict(value)
        elif isinstance(target, MutableMapping) and isinstance(value, Mapping):
            _update(target, value)
        elif isinstance(target, list):
            target[:] = value
        elif isinstance(self._state, MutableMapping):
            self._state[name] = value
        elif target != value:
            raise LayoutMismatchError(f"cannot set {name!r}: the state mapping is read-only")

    def _moments(self, found: Enumeration) -> dict[int, Part]:
        """The states of optimizers, by ``id``, that are written by columns."""
        columns = {}
        for name, structure in found.structures.items():
            if is_optimizer(self._state[name]) and isinstance(structure, Mapping):
                moments = structure.get("state")
                if (part := _in_columns(moments, found.name_of)) is not None:
                    columns[id(moments)] = part
        return columns

    def _current(self) -> Enumeration:
        if self._found is None:
            self.refresh()
        assert self._found is not None
        return self._found


def _in_columns(moments: Any, name_of: Mapping[int, str]) -> Part | None:
    """The state of an optimizer that keeps tensors alone, in columns: there are thousands of them.

    None if it keeps anything else, or has one dict for two parameters.
    """
    if type(moments) is not dict or not {*map(type, moments)} <= {int}:
        return None
    holders = list(moments.values())
    if not {*map(type, holders)} <= {dict} or len({*map(id, holders)}) < len(holders):
        return None
    keys = list(chain.from_iterable(holders))
    names = list(map(name_of.get, map(id, chain.from_iterable(map(dict.values, holders)))))
    if None in names or not {*map(type, keys)} <= {str}:
        return None
    return Part((list(moments), list(map(len, holders)), keys, names))


def _taken_from(tensors: Mapping[str, torch.Tensor]) -> Callable[[Any], Any]:
    """A function that gives the tensor for a stored name, and what was stored in columns."""

    def take(stored: Any) -> Any:
        if isinstance(stored, tuple):
            numbers, lengths, keys, names = stored
            pairs = zip(keys, map(take, names), strict=True)
            return {n: dict(islice(pairs, k)) for n, k in zip(numbers, lengths, strict=True)}
        if stored not in tensors:
            raise LayoutMismatchError(f"the small objects refer to {stored}, which was not stored")
        return tensors[stored]

    return take


def _update(old: MutableMapping[Any, Any], new: Mapping[Any, Any]) -> None:
    """Make ``old`` equal to ``new``, keeping nested dicts and tensors that are there."""
    for key in [key for key in old if key not in new]:
        del old[key]
    for key, value in new.items():
        if isinstance(old.get(key), MutableMapping) and isinstance(value, Mapping):
            _update(old[key], value)
        elif key not in old or old[key] is not value:
            old[key] = value


State = Mapping[str, Any] | TrainingState


class StateAdapter:
    """Makes a TrainingState of a mapping, once for each mapping; passes a TrainingState on.

    ``replicated`` maps prefixes of tensor names to the process group whose ranks hold equal bits.
    """

    def __init__(self, replicated: Mapping[str, Any] | None = None) -> None:
        self._replicated = replicated
        self._adapted: MappingState | None = None

    def __call__(self, state: State) -> TrainingState:
        """The adapter of this very mapping, with what it has learned of its tensors."""
        if not isinstance(state, Mapping):
            return state
        if self._adapted is None or not self._adapted.adapts(state):
            self._adapted = MappingState(state, replicated=self._replicated)
        return self._adapted

    def forget_tensors(self) -> None:
        """Let the adapter of a mapping let go of its tensors; a TrainingState does so itself."""
        if self._adapted is not None:
            self._adapted.forget_tensors()
