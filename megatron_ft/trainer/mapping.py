"""The public ``state`` mapping, as a TrainingState.

The state that a program passes, as what captures and restores work on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.objects import Lasting, Part, decode, encode
from megatron_ft.trainer.entries import Entries
from megatron_ft.trainer.enumeration import Enumeration, is_optimizer, is_stateful, local_tensor
from megatron_ft.trainer.state import TrainingState

_NAMES = "names"
_STRUCTURES = "structures"


class MappingState:
    """Adapts names to tensors, DTensors, Stateful objects and small values (core.objects.encode).

    Loads are in place: tensors keep their identity, dicts and lists are updated,
    Stateful objects get ``load_state_dict``, other values replace the mapping's own,
    which must then be mutable.  ``replicated`` maps prefixes of tensor names to the
    process group whose ranks hold equal values.  ``lazy`` and ``boundary`` name
    entries that are to be copied during forward, or at once, against the defaults of
    enumerate_entry.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        replicated: Mapping[str, Any] | None = None,
        lazy: Collection[str] = (),
        boundary: Collection[str] = (),
    ) -> None:
        """Nothing is read yet; refresh() does."""
        self._state = state
        self._replicated = dict(replicated or {})
        forced = {**dict.fromkeys(boundary, False), **dict.fromkeys(lazy, True)}
        self._entries = Entries(state, forced)
        self._found: Enumeration | None = None
        self._lasting: dict[int, Lasting] = {}
        self._adopted: dict[str, torch.Tensor] = {}

    def adapts(self, state: Any) -> bool:
        """Whether this is the adapter of that very mapping."""
        return self._state is state

    def refresh(self) -> None:
        """Enumerate again what may hold other tensors than last time; see Entries."""
        found = self._entries.refresh()
        if found is not self._found:
            self._found, self._lasting = found, {id(kept): Lasting() for kept in found.lasting}

    def forget_tensors(self) -> None:
        """Let go of what was enumerated, until it is asked for."""
        self._found, self._lasting = None, {}
        self._entries.forget()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, optimizer tensors, plain tensors; see enumerate_entry."""
        return self._current().lazy

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        """Buffers and tensors of other Stateful objects; see enumerate_entry."""
        return self._current().boundary

    def objects(self) -> dict[str, Any]:
        """All else, encoded, with stored tensors replaced by their names."""
        found = self._current()

        def stored(part: Any) -> Part | Lasting | None:
            # The enumeration keeps all of these alive, so no other object has one of these ids.
            name = found.name_of.get(id(part))
            return self._lasting.get(id(part)) if name is None else Part(name)

        return {_NAMES: sorted(self._state), _STRUCTURES: encode(found.structures, stored)}

    def replicas(self) -> dict[str, Any]:
        """The lazily copied tensors below the declared prefixes, with their groups."""
        if not self._replicated:
            return {}
        groups = ((name, self.replica_group(name)) for name in self.tensors())
        return {name: group for name, group in groups if group is not None}

    def replica_group(self, name: str) -> Any:
        """The group declared for a prefix of ``name``, or None."""
        for prefix, group in self._replicated.items():
            if name == prefix or name.startswith(prefix.rstrip("/") + "/"):
                return group
        return None

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

    def load(self, objects: dict[str, Any]) -> None:
        """Hand every object its state; raises LayoutMismatchError if names differ."""
        handles = {**self._adopted, **self._current().handles}
        differing = sorted(set(objects[_NAMES]) ^ set(self._state))
        if differing:
            raise LayoutMismatchError(
                f"the state mapping and the snapshot differ in {', '.join(differing)}; "
                "load with the mapping that save() is called with"
            )
        for name, value in decode(objects[_STRUCTURES], _taken_from(handles)).items():
            self._load_one(name, value)
        self._adopted, self._lasting, self._found = {}, {}, None
        self._entries.objects_loaded()

    def _load_one(self, name: str, value: Any) -> None:
        target = self._state[name]
        if is_optimizer(target):
            _wrap_moments(target, value)
        if is_stateful(target):
            target.load_state_dict(value)
        elif isinstance(target, MutableMapping) and isinstance(value, Mapping):
            _update(target, value)
        elif isinstance(target, list):
            target[:] = value
        elif isinstance(self._state, MutableMapping):
            self._state[name] = value
        elif target != value:
            raise LayoutMismatchError(f"cannot set {name!r}: the state mapping is read-only")

    def _current(self) -> Enumeration:
        if self._found is None:
            self.refresh()
        assert self._found is not None
        return self._found


def _taken_from(tensors: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Puts tensors back where their names are."""

    def take(name: str) -> torch.Tensor:
        if name not in tensors:
            raise LayoutMismatchError(f"the small objects refer to {name}, which was not stored")
        return tensors[name]

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


def _wrap_moments(optimizer: Any, content: Any) -> None:
    """Give moments of DTensor parameters the placement of their parameter.

    A fresh optimizer has no moments to say what they were; torch creates them like
    the parameter, so a local shard of the same shape is one of these.
    """
    parameters = dict(enumerate(_parameters(optimizer)))
    states = content.get("state", {}) if isinstance(content, Mapping) else {}
    for index, moments in states.items():
        parameter = parameters.get(index)
        if parameter is None or local_tensor(parameter) is parameter:
            continue
        for key, value in moments.items():
            moments[key] = _like_parameter(value, parameter)


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _like_parameter(value: Any, parameter: Any) -> Any:
    local = local_tensor(parameter)
    if type(value) is not torch.Tensor or value.shape != local.shape or not value.dim():
        return value
    return type(parameter).from_local(
        value.to(local.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.size(),
        stride=parameter.stride(),
    )


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
