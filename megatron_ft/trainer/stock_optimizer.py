"""Optimizers whose state_dict is torch's own, and whether it would give what it gave."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, compress
from typing import Any, NamedTuple

import torch

from megatron_ft.core.objects import PLAIN
from megatron_ft.trainer.enumeration import (
    DENSE,
    Contents,
    Enumeration,
    enumerate_structure,
    same_objects,
)

_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_READ = ("state", "param_groups", *_HOOKS)
_STOCK = {name: getattr(torch.optim.Optimizer, name) for name in ("state_dict", "__getattribute__")}
_LASTING = DENSE | {type(None)}
_KNOWN = _LASTING | PLAIN
"""Types of what may be kept for a parameter; a tensor's subclass may hide another tensor."""


class StockOptimizer:
    """An optimizer that has torch's own state_dict, no hooks of it, and plain values in its state.

    Remembered are the parameters of its groups and the tensors of its state; calls that loop in C
    compare them.  What else is in groups, or in the state, is read each time.
    """

    def __init__(self, optimizer: Any, name: str, lazy: bool) -> None:
        """As it is now, which is to be enumerated next under ``name``."""
        self.value: object = optimizer
        self._optimizer, self._name, self._lazy = optimizer, name, lazy
        self._seen = _look(optimizer)
        self._content: dict[str, Any] = {}
        self._in_groups = Enumeration()

    def learn(self, found: Enumeration) -> bool:
        """Whether ``holds`` will know if what was enumerated is still so."""
        content = found.structures[self._name]
        seen = self._seen
        if seen is None or not {*map(type, seen.keys)} <= {str} or not {*seen.types} <= _KNOWN:
            return False
        self._content = content
        groups = self._groups()
        self._in_groups = self._enumerated(groups)
        packed = _alike(groups, content["param_groups"])
        if packed and {*seen.types} <= _LASTING:
            found.lasting.append(content["state"])
        return packed

    def holds(self, found: Enumeration) -> bool:
        """Whether all tensors are those of last time; tells ``found`` the other values of now."""
        now = _look(self._optimizer)
        if now is None or self._seen is None or not now.same(self._seen):
            return False
        groups = self._groups()
        found.structures[self._name] = {**self._content, "param_groups": groups}
        return self._in_groups.same_tensors(self._enumerated(groups))

    def _groups(self) -> list[dict[str, Any]]:
        """As torch packs them: with numbers in the place of parameters, at the end."""
        packed = self._content["param_groups"]
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": before["params"],
            }
            for group, before in zip(self._optimizer.param_groups, packed, strict=True)
        ]

    def _enumerated(self, groups: list[dict[str, Any]]) -> Enumeration:
        found = Enumeration()
        enumerate_structure(found, f"{self._name}/param_groups", groups, self._lazy)
        return found


class _Look(NamedTuple):
    """What torch's own state_dict reads of parameters and of what is kept for each of them."""

    members: list[int]
    parameters: list[Any]
    owners: list[Any]
    holders: list[dict[Any, Any]]
    lengths: list[int]
    keys: list[Any]
    types: list[type]
    tensors: list[torch.Tensor]

    def same(self, other: _Look) -> bool:
        """By identity: parameters are equal to others of the same value."""
        return (
            self.members == other.members
            and self.lengths == other.lengths
            and self.types == other.types
            and same_objects(self.parameters, other.parameters)
            and same_objects(self.owners, other.owners)
            and same_objects(self.holders, other.holders)
            and same_objects(self.keys, other.keys)
            and same_objects(self.tensors, other.tensors)
        )


def _look(optimizer: Any) -> _Look | None:
    """None unless it has torch's own state_dict, no hooks of it, and plain dicts and lists."""
    if not _is_stock(type(optimizer)):
        return None
    own = vars(optimizer)
    if "state_dict" in own or not own.keys() >= {*_READ} or any(own[name] for name in _HOOKS):
        return None
    state, groups = own["state"], own["param_groups"]
    if type(state) not in (dict, defaultdict) or type(groups) is not list:
        return None
    return _read(state, groups)


def _read(state: dict[Any, Any], groups: list[Any]) -> _Look | None:
    owners, holders = list(state), list(state.values())
    if not {*map(type, chain(groups, holders))} <= {dict}:
        return None
    members = [group.get("params") for group in groups]
    if not {*map(type, members)} <= {list}:
        return None
    parameters = list(chain.from_iterable(members))
    lengths, keys, values = Contents.of(holders)
    types = list(map(type, values))
    tensors = list(compress(values, map(DENSE.__contains__, types)))
    counts = list(map(len, members))
    return _Look(counts, parameters, owners, holders, lengths, keys, types, tensors)


def _is_stock(kind: type) -> bool:
    return (
        issubclass(kind, torch.optim.Optimizer)
        and all(getattr(kind, name) is method for name, method in _STOCK.items())
        and not any(hasattr(kind, name) for name in _READ)
    )


def _alike(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether torch packed the groups as is done here."""
    return [list(group) for group in mine] == [list(group) for group in theirs] and all(
        same_objects(list(one.values()), list(other.values()))
        for one, other in zip(mine, theirs, strict=True)
    )
