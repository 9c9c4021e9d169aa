"""A model's modules, parameters and buffers by name, walked anew only when one was replaced.

What modules keep outside parameters and buffers, through torch's own interface for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from megatron_ft.trainer.enumeration import Contents, same_objects

NamedModules = Iterable[tuple[str, torch.nn.Module]]


def extra_states(modules: NamedModules) -> dict[str, Any]:
    """The extra states of ``modules`` by name; a module that has nothing to keep is left out.

    Transformer Engine's modules keep their fp8 scales and histories so.
    """
    states = {name: module.get_extra_state() for name, module in modules if has_extra_state(module)}
    return {name: state for name, state in states.items() if state is not None}


def load_extra_states(modules: NamedModules, states: dict[str, Any]) -> None:
    """Set what :func:`extra_states` gave."""
    for name, module in modules:
        if name in states and has_extra_state(module):
            module.set_extra_state(states[name])


def has_extra_state(module: torch.nn.Module) -> bool:
    """Whether its class says what else to keep of it."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


Roots = Callable[[], Sequence[torch.nn.Module]]
Name = Callable[[int, str], str]

_HOLDER_NAMES = ("_modules", "_parameters", "_buffers")
_HOLDERS = itemgetter(*_HOLDER_NAMES)
_WALKS = ("named_modules", "named_parameters", "named_buffers")
_OVERRIDABLE = (*_WALKS, "_named_members")


class ModuleTree:
    """What torch's ``named_modules``, ``named_parameters`` and ``named_buffers`` give, as of the
    last ``refresh``: each parameter and buffer once, by the first of its names.  ``keeping`` are
    the modules that have extra state.

    Nothing is remembered of modules that answer these calls in a way of their own: they are
    asked each time.
    """

    def __init__(self, roots: Roots, name: Name = lambda _number, name: name) -> None:
        """``roots`` are asked for at each look; ``name(number, name)`` is what that is called
        here which is called ``name`` below the root of that number.  Nothing is read yet."""
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.keeping: list[tuple[str, torch.nn.Module]] = []
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._find_roots, self._name = roots, name
        self._roots: list[torch.nn.Module] = []
        self._attributes: list[dict[str, Any]] = []
        self._seen: Contents | None = None

    def refresh(self) -> bool:
        """Look at the model as it is now; True unless it holds the very objects of last time."""
        roots = list(self._find_roots())
        if self._seen is not None and same_objects(roots, self._roots):
            if self._seen.same(self._look()):
                return False
        self._walk(roots)
        return True

    def forget(self) -> None:
        """Let go of all that was found."""
        self.modules, self.keeping, self.parameters, self.buffers = [], [], {}, {}
        self._roots, self._attributes, self._seen = [], [], None

    def _look(self) -> Contents:
        return Contents.of(chain.from_iterable(map(_HOLDERS, self._attributes)))

    def _walk(self, roots: list[torch.nn.Module]) -> None:
        self._seen = None
        modules, parameters, buffers = (self._named(roots, walk) for walk in _WALKS)
        self.modules, self.parameters, self.buffers = modules, dict(parameters), dict(buffers)
        self.keeping = [named for named in modules if has_extra_state(named[1])]
        # Children too: one with a walk of its own may have kept itself out of this one.
        every = chain(roots, *(module.children() for _, module in modules))
        if all(map(_walks_as_torch, every)):
            self._roots, self._attributes = roots, [vars(module) for _, module in modules]
            self._seen = self._look()

    def _named(self, roots: list[torch.nn.Module], walk: str) -> list[tuple[str, Any]]:
        return [
            (self._name(number, name), found)
            for number, root in enumerate(roots)
            for name, found in getattr(root, walk)()
        ]


def _walks_as_torch(module: torch.nn.Module) -> bool:
    """Whether what its names are follows from its plain dicts alone."""
    kind, own = type(module), vars(module)
    stock = all(getattr(kind, walk) is getattr(torch.nn.Module, walk) for walk in _OVERRIDABLE)
    plain = all(isinstance(own.get(holder), dict) for holder in _HOLDER_NAMES)
    return stock and plain and not any(walk in own for walk in _OVERRIDABLE)
