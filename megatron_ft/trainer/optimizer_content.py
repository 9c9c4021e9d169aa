"""The content of optimizers in snapshots, with the optimizer's own tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from megatron_ft.core.objects import PLAIN, Part, written_once
from megatron_ft.trainer.addresses import DENSE
from megatron_ft.trainer.coverage import numbers_of
from megatron_ft.trainer.nested import named_tensors, tensors_in
from megatron_ft.trainer.tensor_table import Members

_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class OptimizerState:
    """The content of an optimizer as of the last ``refresh``; a mapping has it as ``name``.

    ``tensors`` by name, the same dict while they are the same, and ``structure``: what is encoded
    with them, with a Part in the place of state that is written by columns.
    """

    def __init__(self, name: str, optimizer: Any) -> None:
        self.optimizer, self._name = optimizer, name
        self.forget()

    def forget(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.structure: Any = None
        self._members: Members | None = None
        self._numbers: list[Any] = []

    def refresh(self) -> None:
        """Look at the optimizer as it is now: at thousands of tensors only if one is another."""
        members = _members(self.optimizer)
        if members is not None and members.same(self._members):
            self.structure = {**self.structure, "param_groups": self._groups()}
            return
        self.structure = content = optimizer_content(self.optimizer)
        self.tensors, self._members = named_tensors(self._name, content), None
        if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
            return
        names = {id(tensor): name for name, tensor in reversed(self.tensors.items())}
        if (moments := _in_columns(content["state"], names)) is not None:
            self.structure = {**content, "state": moments}
            # Of tensors alone: other values may change where they are.
            self._members = members
            self._numbers = [group["params"] for group in content["param_groups"]]

    def _groups(self) -> list[dict[str, Any]]:
        pairs = zip(self.optimizer.param_groups, self._numbers, strict=True)
        return [{**_options(group), "params": numbers} for group, numbers in pairs]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _members(optimizer: Any) -> Members | None:
    """All that a plain optimizer of torch holds but its rates; None if it may hold more.

    Tensors among the rates belong to it.
    """
    kept = getattr(optimizer, "state", None)
    if not _is_stock(optimizer) or not isinstance(kept, dict):
        return None
    values = list(chain.from_iterable(group.values() for group in optimizer.param_groups))
    lists = [value for value in values if type(value) in (list, tuple)]
    values += chain.from_iterable(lists)
    if not {*map(type, values)} <= PLAIN | DENSE | {list, tuple}:
        return None
    tensors = [value for value in values if type(value) in DENSE]
    found = Members.of(list(kept.values()), (*kept, *tensors))
    sizes = [list(group) for group in optimizer.param_groups], list(map(len, lists))
    return found and Members([*found.keys, *sizes], found.values)


def _in_columns(moments: Any, name_of: Mapping[int, str]) -> Part | None:
    """The state of an optimizer that keeps tensors alone, in columns: there are thousands of them.

    None if it keeps anything else, or has one dict for two parameters.
    """
    if type(moments) is not dict or not {*map(type, moments)} <= {int}:
        return None
    holders = list(moments.values())
    if not {*map(type, holders)} <= {dict} or len({*map(id, holders)}) < len(holders):
        return None
    keys = tuple(chain.from_iterable(holders))
    names = tuple(map(name_of.get, map(id, chain.from_iterable(map(dict.values, holders)))))
    if None in names or not {*map(type, keys)} <= {str}:
        return None
    return written_once((tuple(moments), tuple(map(len, holders)), keys, names))


def optimizer_content(optimizer: Any) -> Any:
    """The content of ``state_dict``, without copies of tensors of the state.

    Hooks and overriding methods may clone, cast or gather them.  Where these answer in another
    form than torch's, what they give is given: the check by address finds what is missing.
    """
    content = optimizer.state_dict()
    kept = getattr(optimizer, "state", None)
    if _is_stock(optimizer) or not isinstance(kept, Mapping) or not isinstance(content, Mapping):
        return content
    given = {id(tensor) for _, tensor in tensors_in("", content)}
    if all(id(tensor) in given for _, tensor in tensors_in("", list(kept.values()))):
        return content
    numbers = numbers_of(optimizer)
    own = {numbers.get(id(key), key): value for key, value in kept.items()}
    if not _same_form(own, content.get("state")):
        return content
    return {**content, "state": own}


def _is_stock(optimizer: Any) -> bool:
    plain: Any = torch.optim.Optimizer.state_dict
    same = getattr(type(optimizer), "state_dict", None) is plain
    hooked = any(getattr(optimizer, name, None) for name in _HOOKS)
    return same and "state_dict" not in vars(optimizer) and not hooked


def _same_form(own: Any, given: Any) -> bool:
    """True if both hold values under the same keys, tensors where the other has one."""
    if isinstance(own, Mapping):
        same = isinstance(given, Mapping) and own.keys() == given.keys()
        return same and all(_same_form(value, given[key]) for key, value in own.items())
    return isinstance(own, torch.Tensor) == isinstance(given, torch.Tensor)
