"""Coverage by address where a framework keeps flat buffers, and weights that follow from masters.

What trains there is mostly a view: into memory that is captured, or into weights that a restore
derives from captured masters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.addresses import AddressBook, local_tensor
from megatron_ft.trainer.coverage import Named, is_empty, places
from megatron_ft.trainer.module_tree import ModuleTree, Name, Roots
from megatron_ft.trainer.nested import tensors_in


class _Memory:
    """Memory of some tensors: finds out if it holds all of another one, of the same dtype."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        every = list(tensors)
        self._places = set(places(every))
        named = {str(number): local_tensor(one) for number, one in enumerate(every)}
        self._book = AddressBook(named)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True also for the very tensor, if its memory has no address."""
        if places([tensor])[0] in self._places:
            return True
        local = local_tensor(tensor)
        is_plain = local.layout is torch.strided and not local.is_meta
        return is_plain and self._book.find(local.detach()) is not None


def derived_of(
    held: Iterable[Named], captured: Iterable[torch.Tensor], derived: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of ``held`` that lie in no ``captured`` memory, by name: a restore derives them.

    ConfigError that names the first that lies in no ``derived`` memory either.
    """
    ours, follows = _Memory(captured), _Memory(derived)
    rest = {name: one for name, one in held if not is_empty(one) and not ours.holds(one)}
    missing = [name for name, one in rest.items() if not follows.holds(one)]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors that train are in no memory that a snapshot captures or a "
            f"restore derives, {missing[0]} first: something has replaced its memory or hides it. "
            "Make it a parameter or buffer of the model before the framework is given that, and "
            "do not set its .data afterwards"
        )
    return rest


def in_groups(optimizer: Any) -> list[torch.Tensor]:
    """Tensors of its groups other than parameters, such as rates: they are small objects."""
    groups = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
    return [tensor for _, tensor in tensors_in("", groups)]


def members(roots: Roots, name: Name = lambda _number, name: name) -> list[Named]:
    """All parameters and buffers of the modules, by each of their names.

    Modules are not asked: some hide what they hold.
    """
    tree = ModuleTree(roots, name, every_name=True)
    tree.refresh()
    return [*tree.parameters.items(), *tree.buffers.items()]
