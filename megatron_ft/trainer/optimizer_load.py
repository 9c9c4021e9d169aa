"""Restores of optimizers: their groups and hooks as ``load_state_dict`` has them, their state as
it was stored.

torch's ``load_state_dict`` casts the state to the dtype of its parameter, moves it to the
parameter's device, and makes another object of each iterable.  Optimizers that keep fp32 moments
for bf16 parameters, 8-bit moments, or texts would continue with other state than they had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from megatron_ft.core.errors import StateMismatchError
from megatron_ft.trainer.addresses import DENSE, local_tensor
from megatron_ft.trainer.optimizer_content import optimizer_content
from megatron_ft.trainer.state import same_bits

GROUPS = "param_groups"
"""The part of an optimizer's ``state_dict`` that is its own matter to load."""


def parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    """All parameters of an optimizer, in the order in which ``state_dict`` numbers them."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


@contextmanager
def exact_loads() -> Iterator[None]:
    """Inside, ``load_state_dict`` of torch's optimizers takes the state as it is given.

    Classes and functions that call it do the same: wrappers, overriding methods, and
    ``set_optimizer_state_dict`` of torch.distributed.checkpoint.
    """
    optimizer: Any = torch.optim.Optimizer
    original = optimizer.load_state_dict
    optimizer.load_state_dict = _load_as_given
    try:
        yield
    finally:
        optimizer.load_state_dict = original


def _load_as_given(self: Any, state_dict: Mapping[str, Any]) -> None:
    """As torch's method, hooks and ``__setstate__`` included, but without its casts.

    The dicts of groups and state stay the same objects, and so do the tensors that are given.
    """
    content: Any = dict(state_dict)
    for before in getattr(self, "_optimizer_load_state_dict_pre_hooks", {}).values():
        changed = before(self, content)
        content = content if changed is None else changed
    owners = _owners(self.param_groups, content[GROUPS])
    _require_same_class(self, content[GROUPS])
    for group, values in zip(self.param_groups, content[GROUPS], strict=True):
        kept = {name: group[name] for name in ("params", "param_names") if name in group}
        loaded = {name: value for name, value in values.items() if name != "params"}
        group.clear()
        group.update({**kept, **loaded})
    state = self.state if isinstance(self.state, MutableMapping) else defaultdict(dict)
    made = {owners.get(key, key): _copied(kept) for key, kept in content["state"].items()}
    state.clear()
    state.update(made)
    self.__setstate__({"state": state, GROUPS: self.param_groups})
    for after in getattr(self, "_optimizer_load_state_dict_post_hooks", {}).values():
        after(self)


def _owners(groups: list[dict[str, Any]], stored: list[dict[str, Any]]) -> dict[Any, Any]:
    """The parameter of each stored number."""
    ours, theirs = ([len(group["params"]) for group in given] for given in (groups, stored))
    if ours != theirs:
        raise StateMismatchError(
            f"the optimizer has parameter groups of {ours} parameters, the snapshot of {theirs}: "
            "build the same model and optimizer as in the run that saved it. A group that it had "
            "added by then (add_param_group) must be there before `load`"
        )
    numbers = chain.from_iterable(group["params"] for group in stored)
    return dict(zip(numbers, chain.from_iterable(group["params"] for group in groups), strict=True))


def _require_same_class(optimizer: Any, stored: list[dict[str, Any]]) -> None:
    """StateMismatchError if groups lack what this class reads, and have what it does not know.

    One of the two alone may be a new release of the class, or the program's own value.
    """
    for group, values in zip(optimizer.param_groups, stored, strict=True):
        lacks = getattr(optimizer, "defaults", {}).keys() - values.keys()
        more = values.keys() - group.keys() - {"initial_lr"}
        if lacks and more:
            raise StateMismatchError(
                f"the optimizer is {type(optimizer).__name__}, which reads "
                f"{', '.join(sorted(lacks))}; that of the snapshot had "
                f"{', '.join(sorted(more))} and is of another class. "
                "An optimizer that the run had replaced by then must be so before `load`"
            )


def _copied(kept: Any) -> Any:
    """Copy dicts and lists, which the optimizer changes, and nothing that is in them."""
    if type(kept) is dict:
        return {key: _copied(value) for key, value in kept.items()}
    return [_copied(value) for value in kept] if type(kept) is list else kept


def load_optimizer(name: str, optimizer: Any, content: Any) -> None:
    """Give an optimizer its stored state, exactly; ``name`` is what it is called in messages.

    State that the optimizer's own ``load_state_dict`` has converted is put back.
    StateMismatchError names a tensor of which that is impossible.
    """
    load = optimizer.load_state_dict
    if getattr(load, "__func__", None) is torch.optim.Optimizer.load_state_dict:
        # Also where a wrapper has bound the method of the optimizer in it.
        _load_as_given(load.__self__, content)
    else:
        with exact_loads():
            load(content)
    changed = [*_differing(name, content, optimizer_content(optimizer))]
    for place in changed:
        if isinstance(place.container, MutableMapping | list):
            place.container[place.key] = place.stored
    for wrong in _differing(name, content, optimizer_content(optimizer)) if changed else ():
        raise StateMismatchError(
            f"{wrong.name} is {describe(wrong.found)} once it was loaded, in the snapshot "
            f"{describe(wrong.stored)}: {type(optimizer).__name__}.load_state_dict has changed "
            "it, and state_dict gives copies. Let load_state_dict keep dtypes, shapes and devices, "
            "or state_dict give the state itself"
        )


class _Place(NamedTuple):
    """A value of the state that is not as stored, and where the optimizer keeps it."""

    name: str
    container: Any
    key: Any
    found: Any
    stored: Any


_NOTHING = object()


def _differing(name: str, stored: Any, found: Any) -> Iterator[_Place]:
    """All that is not as stored, parameter groups aside."""
    for key, value in stored.items() if isinstance(stored, Mapping) else enumerate(stored):
        there = found.get(key, _NOTHING) if isinstance(found, Mapping) else found[key]
        if key == GROUPS or value is there:
            continue
        if _alike_containers(value, there):
            yield from _differing(f"{name}/{key}", value, there)
        elif not _same(value, there):
            yield _Place(f"{name}/{key}", found, key, there, value)


def _alike_containers(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping):
        return isinstance(right, Mapping)
    sequences = isinstance(left, list | tuple) and type(left) is type(right)
    return sequences and len(left) == len(right)


def _same(stored: Any, found: Any) -> bool:
    if isinstance(stored, torch.Tensor) and isinstance(found, torch.Tensor):
        return _form(stored) == _form(found) and same_bits(
            local_tensor(stored), local_tensor(found)
        )
    if isinstance(stored, torch.Tensor) or isinstance(found, torch.Tensor):
        return False
    # Of other objects, only plain ones are certain to say whether they are equal.
    plain = isinstance(stored, str | bytes | int | float | None)
    return type(stored) is type(found) and (not plain or stored == found or stored != stored)


def _form(tensor: Any) -> tuple[Any, ...]:
    kind = torch.Tensor if type(tensor) in DENSE else type(tensor)
    placed = getattr(tensor, "placements", None)
    return kind, tensor.dtype, tensor.shape, local_tensor(tensor).device, placed


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "missing" if value is _NOTHING else f"a {type(value).__name__}"
    placed = f" placed as {placements}" if (placements := getattr(value, "placements", "")) else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{placed}"
