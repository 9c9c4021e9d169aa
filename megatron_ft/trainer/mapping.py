"""The public ``state`` mapping, as a TrainingState.

One pass finds the tensors in a mapping of names to tensors, DTensors, modules, optimizers, other
objects with ``state_dict``, and small values.  The pass is made again at each iteration boundary:
any of these objects may hold other tensors than last time without being another object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError, LayoutMismatchError, StateMismatchError
from megatron_ft.core.objects import Part, decode, encode
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.trainer import master_tensors
from megatron_ft.trainer.addresses import DENSE
from megatron_ft.trainer.coverage import (
    Named,
    Written,
    held_by_module,
    held_by_optimizer,
    require_covered,
)
from megatron_ft.trainer.enumeration import Enumeration, NamedTensors, PlainTensors
from megatron_ft.trainer.forms import check_forms
from megatron_ft.trainer.in_place import filled
from megatron_ft.trainer.module_state import ModuleState
from megatron_ft.trainer.nested import is_optimizer, is_stateful
from megatron_ft.trainer.optimizer_content import OptimizerState
from megatron_ft.trainer.optimizer_load import exact_loads, load_optimizer, parameters
from megatron_ft.trainer.placements import StatePlaces, dtensor_places, has_device
from megatron_ft.trainer.plan import check_kinds
from megatron_ft.trainer.replicas import groups_of_wrapped
from megatron_ft.trainer.state import Lost, RngState, TrainingState
from megatron_ft.trainer.uncaptured import uncaptured

logger = logging.getLogger(__name__)

_NAMES = "names"
_STRUCTURES = "structures"
_FLAGS = "requires_grad"
_OWN = "own"
"""Names of the mapping's entries that a load leaves as they are."""
_PLACES = "places"
"""Tensors of optimizers that lie elsewhere than usual; not written where there are none."""


class MappingState:
    """Adapts names to tensors, DTensors, Stateful objects and small values (core.objects.encode).

    Loads are in place: tensors keep their identity, containers are filled,
    Stateful objects get ``load_state_dict``, other values replace the mapping's own,
    which must then be mutable.  ``replicated`` maps prefixes of tensor names to the
    process group whose ranks hold equal values; ``leave_out`` are patterns of what
    of modules is not captured.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        replicated: Mapping[str, Any] | None = None,
        leave_out: Sequence[str] = (),
    ) -> None:
        self._state, self._leave_out = state, tuple(leave_out)
        self._modules: dict[str, ModuleState] = {}
        self._optimizers: dict[str, OptimizerState] = {}
        self._plain, self._before = PlainTensors(), NamedTensors([], [])
        self._written: Written | None = None
        self._replicated = dict(replicated or {})
        self._found: Enumeration | None = None
        self._adopted: dict[str, torch.Tensor] = {}
        self._placed: tuple[list[str], dict[str, Any]] = [], {}

    def adapts(self, state: Any) -> bool:
        return self._state is state

    def refresh(self) -> None:
        self._found = None
        self._found = Enumeration(self._entries(), self._plain, self._before)
        self._before = self._found.tensors

    def _entries(self) -> dict[str, Any]:
        """All but plain tensors; what is known of modules and optimizers in their place."""
        tensors, others = self._state, dict[str, Any]()
        if not {*map(type, tensors.values())} <= DENSE:
            tensors = {n: one for n, one in tensors.items() if isinstance(one, torch.Tensor)}
            others = {n: self._known(n, v) for n, v in self._state.items() if n not in tensors}
        self._plain.refresh(tensors)
        self._modules = {n: m for n, m in others.items() if isinstance(m, ModuleState)}
        self._optimizers = {n: o for n, o in others.items() if isinstance(o, OptimizerState)}
        return others

    def _known(self, name: str, value: Any) -> Any:
        """The value; of a module or an optimizer, what is known of it since the last time."""
        if isinstance(value, torch.nn.Module):
            module = self._modules.get(name)
            known = module is not None and module.module is value
            return module if known else ModuleState(name, value, self._leave_out)
        if is_optimizer(value):
            optimizer = self._optimizers.get(name)
            known = optimizer is not None and optimizer.optimizer is value
            return optimizer if known else OptimizerState(name, value)
        return value

    def forget_tensors(self) -> None:
        self._found = None
        self._plain, self._before = PlainTensors(), NamedTensors([], [])
        for module in self._modules.values():
            module.forget()
        for optimizer in self._optimizers.values():
            optimizer.forget()

    rescan = forget_tensors

    def require_ready(self) -> None:
        """ConfigError, before training, that names what cannot be captured or filled.

        Objects of other classes are not asked yet: a ``state_dict`` may change its object, as
        that of an optimizer by ``get_optimizer_state_dict`` makes its first step.
        """
        every = self._entries()
        asked = {n: v for n, v in every.items() if not is_stateful(v)}
        check_forms(self._state, {n: v for n, v in asked.items() if v is self._state[n]})
        found = Enumeration(asked, self._plain, self._before)
        check_kinds(found.tensors.lazy | found.tensors.boundary)
        self._encoded(found)
        if not any(map(_may_train, (every[name] for name in every.keys() - asked.keys()))):
            self._require_covered(found)

    def require_covered(self) -> None:
        self._require_covered(self._current())

    def derived(self) -> dict[str, torch.Tensor]:
        return {}

    def restart_losses(self) -> Lost:
        found = uncaptured(self._state, self._captured(self._current()), self._leave_out)
        advice = "put these objects into the state mapping, or name their classes in leave_out"
        return Lost(found, advice)

    def _captured(self, found: Enumeration) -> list[torch.Tensor]:
        left_out = (one for module in self._modules.values() for one in module.left_out.values())
        return [*found.tensors.handles.values(), *found.inlined, *left_out]

    def _require_covered(self, found: Enumeration) -> None:
        require_covered(self._held(), self._captured(found), self._leave_out)

    def _held(self) -> Iterator[Named]:
        for name, value in self._state.items():
            if isinstance(value, torch.nn.Module):
                yield from held_by_module(name, value)
            elif is_optimizer(value):
                yield from held_by_optimizer(name, value)

    def left_out(self) -> list[str]:
        return [name for module in self._modules.values() for name in module.left_out]

    def overwritten(self) -> set[str]:
        """Names of tensors of modules and optimizers that do not hold what was loaded any more.

        Loading other objects has given them other memory, or has written to it.
        """
        written, self._written = self._written, None
        return set() if written is None else written.lost(self.tensors() | self.boundary_tensors())

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._current().tensors.lazy

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        return self._current().tensors.boundary

    def objects(self) -> dict[str, Any]:
        """All else, encoded, with stored tensors replaced by their names."""
        found = self._current()
        flags = {name: module.flags() for name, module in self._modules.items()}
        objects = {_NAMES: sorted(self._state), _STRUCTURES: self._encoded(found)}
        more = {_FLAGS: flags, _PLACES: self._unusual_places(found.tensors)}
        return {**objects, **{name: value for name, value in more.items() if value}}

    def _encoded(self, found: Enumeration) -> bytes:
        name_of = found.tensors.name_of

        def stored(part: Any) -> Part | None:
            # The enumeration keeps all of these alive, so no other object has one of these ids.
            name = name_of.get(id(part))
            if name is not None:
                return Part(name)
            return part if type(part) is Part else None

        return encode(found.structures, stored)

    def _unusual_places(self, tensors: NamedTensors) -> dict[str, Any]:
        """Places of optimizers' tensors that a load needs; looked up anew if there are others."""
        if tensors.all_plain and not has_device():
            return {}
        names = list(tensors.handles)
        if names != self._placed[0]:
            made: dict[str, Any] = {}
            for places in self._optimizer_places().values():
                made |= places.exceptions(tensors.handles)
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
        return self._current().tensors.wrapped

    def optimizer_of(self, names: Sequence[str]) -> str:
        """The first optimizer that has one of these tensors among its parameters or its state."""
        handles = self._current().tensors.handles
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
        for prefix, group in self._replicated.items():
            if name == prefix or name.startswith(prefix.rstrip("/") + "/"):
                return group
        return None

    def logical_map(self) -> dict[str, LogicalPlace]:
        return dtensor_places(self._current().tensors.handles).places

    def expect_reshape(self) -> None:
        """Create the moments of optimizers; LayoutMismatchError if a DTensor has no place."""
        for name, value in self._state.items():
            if isinstance(value, torch.optim.Optimizer):
                self._create_moments(name, value)
        self._found = None
        problems = dtensor_places(self._current().tensors.handles).problems
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
            begin = name.split("/", 1)[0]
            owner, module = self._state.get(begin), self._modules.get(begin)
            fixed = module.is_stock if module else isinstance(owner, torch.Tensor)
            if owner is None or fixed:
                # Of DTensors another layout may give a rank others.
                error = LayoutMismatchError if self.wrapped() else StateMismatchError
                raise error(
                    f"the snapshot holds {name}, the state to load into has no such tensor; "
                    "build the same model before you load, and all that the run had added by then"
                )
        self._adopted = dict(tensors)

    def replaces(self, name: str) -> bool:
        """True for the state of an optimizer, whatever a fresh one holds in its place."""
        owner, _, rest = name.partition("/")
        return rest.startswith("state/") and is_optimizer(self._state.get(owner))

    def load(self, objects: dict[str, Any]) -> None:
        """Hand every object its state; raises LayoutMismatchError if names differ."""
        handles = {**self._current().tensors.handles, **self._made(objects.get(_PLACES, {}))}
        differing = sorted(set(objects[_NAMES]) ^ set(self._state))
        if differing:
            raise LayoutMismatchError(
                f"the state mapping and the snapshot differ in {', '.join(differing)}; "
                "load with the mapping that save() is called with. Entries that the run had added "
                "by then must be there before `load`"
            )
        for name, flags in objects.get(_FLAGS, {}).items():
            self._modules[name].load_flags(flags)
        self._written = Written(self._of_trained(handles))
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

    def _of_trained(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        every = self._state.items()
        begins = {n for n, v in every if isinstance(v, torch.nn.Module) or is_optimizer(v)}
        if not begins:
            return {}
        return {n: t for n, t in tensors.items() if n.partition("/")[0] in begins}

    def _load_one(self, name: str, value: Any) -> None:
        target = self._state[name]
        if is_optimizer(target):
            load_optimizer(name, target, value)
        elif name in self._modules:
            self._modules[name].load(value)
        elif is_stateful(target):
            with exact_loads():
                target.load_state_dict(value)
        elif (result := filled(target, value)) is target:
            return
        elif isinstance(self._state, MutableMapping):
            self._state[name] = result
        elif target != value:
            raise LayoutMismatchError(f"cannot set {name!r}: the state mapping is read-only")

    def _current(self) -> Enumeration:
        if self._found is None:
            self.refresh()
        assert self._found is not None
        return self._found


def _may_train(value: Any) -> bool:
    """False for schedules, scalers, random states and loaders, which hold no weights."""
    return type(value).__module__.partition(".")[0] not in ("torch", "megatron_ft", "deepspeed_ext")


def _taken_from(tensors: Mapping[str, torch.Tensor]) -> Callable[[Any], Any]:
    """A function that gives the tensor for a stored name, and what was stored in columns."""

    def tensor_for(stored: Any) -> Any:
        if isinstance(stored, tuple):
            numbers, lengths, keys, names = stored
            pairs = zip(keys, map(tensor_for, names), strict=True)
            return {n: dict(islice(pairs, k)) for n, k in zip(numbers, lengths, strict=True)}
        if stored not in tensors:
            raise LayoutMismatchError(f"the small objects refer to {stored}, which was not stored")
        return tensors[stored]

    return tensor_for


State = Mapping[str, Any] | TrainingState


class StateAdapter:
    """Makes a TrainingState of a mapping, once for each mapping; passes a TrainingState on.

    ``replicated`` maps prefixes of tensor names to the process group whose ranks hold equal bits;
    ``leave_out`` are patterns of what of modules is not captured.
    """

    def __init__(
        self, replicated: Mapping[str, Any] | None = None, leave_out: Sequence[str] = ()
    ) -> None:
        self._replicated, self._leave_out = replicated, leave_out
        self._adapted: MappingState | None = None

    def __call__(self, state: State) -> TrainingState:
        if not isinstance(state, Mapping):
            return state
        if self._adapted is None or not self._adapted.adapts(state):
            self._adapted = MappingState(
                state, replicated=self._replicated, leave_out=self._leave_out
            )
        return self._adapted

    def forget_tensors(self) -> None:
        """Let the adapter of a mapping let go of its tensors; a TrainingState does so itself."""
        if self._adapted is not None:
            self._adapted.forget_tensors()
