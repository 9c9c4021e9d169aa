"""A model's modules, parameters and buffers by name, and what modules keep beside them.

The latter is extra state, through torch's own interface for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

NamedModules = Iterable[tuple[str, torch.nn.Module]]
Named = list[tuple[str, Any]]


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
    """True if the module's class defines extra state."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


Roots = Callable[[], Sequence[torch.nn.Module]]
Name = Callable[[int, str], str]

_OVERRIDABLE = ("named_parameters", "named_buffers", "_named_members")


class ModuleTree:
    """Gives what torch's ``named_parameters`` and ``named_buffers`` do, as of the last ``refresh``:
    each parameter and buffer once, by the first of its names.  ``keeping`` are the modules of
    ``named_modules`` that have extra state.
    """

    def __init__(self, roots: Roots, name: Name = lambda _number, name: name) -> None:
        """``roots`` are asked for at each look; ``name(number, name)`` is what that is called
        here which is called ``name`` below the root of that number.  Nothing is read yet."""
        self._find_roots, self._name = roots, name
        self.forget()

    def forget(self) -> None:
        """Let go of all that was found."""
        self.keeping: list[tuple[str, torch.nn.Module]] = []
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def refresh(self) -> None:
        """Walk the model as it is now."""
        self.forget()
        for number, root in enumerate(self._find_roots()):
            modules, parameters, buffers = _walk(root)
            self.parameters |= {self._name(number, name): found for name, found in parameters}
            self.buffers |= {self._name(number, name): found for name, found in buffers}
            keeping = [named for named in modules if has_extra_state(named[1])]
            self.keeping += [(self._name(number, name), module) for name, module in keeping]


def _walk(root: torch.nn.Module) -> tuple[NamedModules, Named, Named]:
    """One walk instead of three, where the root answers the other two as torch's modules do."""
    modules = list(root.named_modules())
    own, kind = vars(root), type(root)
    stock = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _OVERRIDABLE)
    if not stock or any(name in own for name in _OVERRIDABLE):
        return modules, list(root.named_parameters()), list(root.named_buffers())
    return modules, _members(modules, "_parameters"), _members(modules, "_buffers")


def _members(modules: NamedModules, holder: str) -> Named:
    found, seen = [], set[int]()
    for prefix, module in modules:
        for key, tensor in getattr(module, holder).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((f"{prefix}.{key}" if prefix else key, tensor))
    return found
