"""A model's modules, parameters and buffers by name, and the extra state that modules keep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from megatron_ft.trainer.tensor_table import Members, are_all

NamedModules = Iterable[tuple[str, torch.nn.Module]]
Named = list[tuple[str, Any]]


def extra_states(modules: NamedModules) -> dict[str, Any]:
    """The extra states of ``modules`` by name; a module that has nothing to keep is left out.

    Transformer Engine's modules keep their fp8 scales and histories so.
    """
    states = {name: module.get_extra_state() for name, module in modules if has_extra_state(module)}
    return {name: state for name, state in states.items() if state is not None}


def load_extra_states(modules: NamedModules, states: dict[str, Any]) -> None:
    for name, module in modules:
        if name in states and has_extra_state(module):
            module.set_extra_state(states[name])


def trained(parameters: Iterable[torch.Tensor]) -> bytes:
    """``requires_grad`` of each, a byte each: a loop in C, as there are thousands."""
    return bytes(map(_TRAINED, parameters))


def load_trained(parameters: Collection[torch.Tensor], flags: bytes) -> bool:
    """Set what ``trained`` gave; False if it is of another number of parameters."""
    if len(flags) != len(parameters):
        return False
    for parameter, flag in zip(parameters, flags, strict=True):
        if parameter.requires_grad != bool(flag):
            parameter.requires_grad_(bool(flag))
    return True


def has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


Roots = Callable[[], Sequence[torch.nn.Module]]
Name = Callable[[int, str], str]

_OVERRIDABLE = ("named_modules", "named_parameters", "named_buffers", "_named_members")
_TRAINED = attrgetter("requires_grad")
_HOLDERS = attrgetter("_modules", "_parameters", "_buffers")


class ModuleTree:
    """Gives what torch's ``named_parameters`` and ``named_buffers`` do, as of the last ``refresh``:
    each parameter and buffer once, by the first of its names.  ``keeping`` are the modules of
    ``named_modules`` that have extra state, ``modules`` all of them.
    """

    def __init__(
        self, roots: Roots, name: Name = lambda _number, name: name, *, every_name: bool = False
    ) -> None:
        """``roots`` is called at each refresh; ``name`` maps (root index, module path) to the
        captured name.  Nothing is read yet.

        With ``every_name`` a tied tensor has all of its names, those of ``state_dict``, whatever
        overriding methods of modules give."""
        self._find_roots, self._name, self._every_name = roots, name, every_name
        self.forget()

    def forget(self) -> None:
        self.keeping: list[tuple[str, torch.nn.Module]] = []
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.modules: list[torch.nn.Module] = []
        self._roots: list[torch.nn.Module] = []
        self._members: Members | None = None

    def refresh(self) -> None:
        """Look at the model as it is now: names are made anew only if a member is another.

        Members are compared by identity, in calls that loop in C: there are thousands.
        """
        roots = list(self._find_roots())
        now = self._of_modules() if are_all(roots, self._roots) else None
        if now is not None and now.same(self._members):
            return
        self.forget()
        self._roots = roots
        for number, root in enumerate(roots):
            self._walk(number, root)
        if self._every_name or all(map(_is_stock, roots)):
            members = self._of_modules()
            self._members = members if members and self._are_shown(members) else None

    def _of_modules(self) -> Members | None:
        return Members.of(list(chain.from_iterable(map(_HOLDERS, self.modules))))

    def _are_shown(self, members: Members) -> bool:
        """True if the modules are the roots and all children, so that none of them hides itself."""
        children = {id(value) for value in members.values if isinstance(value, torch.nn.Module)}
        return children | {*map(id, self._roots)} == {*map(id, self.modules)}

    def _walk(self, number: int, root: torch.nn.Module) -> None:
        modules = list(_every_path(root) if self._every_name else root.named_modules())
        self.modules += [module for _, module in modules]
        if self._every_name or _is_stock(root):
            parameters = _named(modules, "_parameters", once=not self._every_name)
            buffers = _named(modules, "_buffers", once=not self._every_name)
        else:
            parameters, buffers = list(root.named_parameters()), list(root.named_buffers())
        self.parameters |= {self._name(number, name): found for name, found in parameters}
        self.buffers |= {self._name(number, name): found for name, found in buffers}
        keeping = [named for named in modules if has_extra_state(named[1])]
        self.keeping += [(self._name(number, name), module) for name, module in keeping]


def _is_stock(root: torch.nn.Module) -> bool:
    """True if the root answers for its members as torch's modules do, so that holders say all."""
    kind = type(root)
    stock = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _OVERRIDABLE)
    return stock and not vars(root).keys() & {*_OVERRIDABLE}


def _named(modules: Sequence[tuple[str, torch.nn.Module]], holder: str, *, once: bool) -> Named:
    found, seen = [], set[int]()
    for prefix, module in modules:
        for key, tensor in getattr(module, holder).items():
            if tensor is not None and not (once and id(tensor) in seen):
                seen.add(id(tensor))
                found.append((f"{prefix}.{key}" if prefix else key, tensor))
    return found


def _every_path(module: torch.nn.Module, path: str = "") -> NamedModules:
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _every_path(child, f"{path}.{name}" if path else name)
