"""One module of a state mapping: its own parameters and buffers, and what its state_dict adds.

What trains is found in the module itself: a ``state_dict`` may give copies (hooks that clone, cast
or gather), other names, or less (buffers that are not persistent).  It is asked for the rest alone:
extra state, and what overriding methods and hooks add to the module's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch

from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer.coverage import matches, places
from megatron_ft.trainer.module_tree import ModuleTree, load_trained, trained

_EXTRA = "_extra_state"
"""Its name in a ``state_dict`` of torch, behind the path of its module."""

_ANSWERS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_HOOKS = attrgetter("_state_dict_hooks", "_state_dict_pre_hooks")


class ModuleState:
    """The content of a module in snapshots, as of the last refresh; a mapping has it as ``name``.

    ``parameters`` and ``buffers`` by the names of ``state_dict`` behind ``name``; ``more`` is what
    only a ``state_dict`` gives.  Those that match a pattern of ``leave_out`` are in ``left_out``.
    """

    def __init__(self, name: str, module: torch.nn.Module, leave_out: Iterable[str] = ()) -> None:
        self.module = module
        self.parameters: Mapping[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.more: dict[str, Any] = {}
        self.left_out: dict[str, torch.Tensor] = {}
        self._begin, self._patterns = f"{name}/", tuple(leave_out)
        self._tree = ModuleTree(lambda: [module], lambda _, key: self._begin + key, every_name=True)
        self._in_order: tuple[Any, list[torch.Tensor]] = None, []

    def forget(self) -> None:
        self._tree.forget()
        self.parameters, self.buffers, self.more, self.left_out = {}, {}, {}, {}
        self._in_order = None, []

    def refresh(self) -> None:
        self._tree.refresh()
        content: Mapping[str, Any] = {}
        if not self.is_stock:
            content = self._state_dict()
            # Hooks may put other tensors in place, as those of FSDP2 do.
            self._tree.refresh()
        self.parameters, self.buffers = self._tree.parameters, self._tree.buffers
        if self._patterns:
            every = {**self.parameters, **self.buffers}
            self.left_out = {n: t for n, t in every.items() if matches(n, self._patterns)}
            self.parameters = self._without(self.parameters)
            self.buffers = self._without(self.buffers)
        self.more = self._additions(content) if content else {}

    @property
    def is_stock(self) -> bool:
        """True if ``state_dict`` is torch's own in all modules: then it has nothing else to give.

        Asked at each boundary of all modules, in calls that loop in C.
        """
        modules = self._tree.modules
        if not all(map(_is_stock_class, {*map(type, modules)})):
            return False
        changed = any(map(contains, map(vars, modules), repeat("state_dict")))
        return not changed and not any(chain.from_iterable(map(_HOOKS, modules)))

    def _without(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: one for name, one in tensors.items() if name not in self.left_out}

    def _state_dict(self) -> Mapping[str, Any]:
        for module in self._tree.modules:
            # Its state_dict is a collective that gathers all weights of the job.
            if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
                raise ConfigError(
                    f"{self._begin[:-1]} holds a FullyShardedDataParallel of FSDP1, which snapshots"
                    " do not support: shard it with torch.distributed.fsdp.fully_shard"
                )
        return _state_dict(self.module)

    def _additions(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The rest of a ``state_dict``: no tensor of the module's own, nor a copy of one by name.

        Of another name it counts as one if it shows the same memory.
        """
        own = self._tree.parameters.keys() | self._tree.buffers.keys()
        named = ((self._begin + key, key, value) for key, value in content.items())
        rest = {
            key: value
            for name, key, value in named
            if name not in own and not matches(name, self._patterns)
        }
        if not any(isinstance(value, torch.Tensor) for value in rest.values()):
            return rest
        every = (*self._tree.parameters.values(), *self._tree.buffers.values())
        known = set(places(every))
        return {
            key: value
            for key, value in rest.items()
            if not (isinstance(value, torch.Tensor) and places([value])[0] in known)
        }

    def split_more(self) -> tuple[dict[str, Any], dict[str, Any]]:
        extra = {key: value for key, value in self.more.items() if _is_extra(key)}
        return extra, {key: value for key, value in self.more.items() if key not in extra}

    def flags(self) -> bytes:
        every = self._tree.parameters
        if self._in_order[0] is not every:
            self._in_order = every, list(map(every.__getitem__, sorted(every)))
        return trained(self._in_order[1])

    def load_flags(self, flags: bytes) -> None:
        """Set what ``flags`` gave.  LayoutMismatchError if it is of another number."""
        self._tree.refresh()
        parameters = self._tree.parameters
        every = [parameters[name] for name in sorted(parameters)]
        if not load_trained(every, flags):
            raise LayoutMismatchError(
                f"{self._begin[:-1]} has {len(every)} parameters, in the snapshot {len(flags)}: "
                "build the same model as in the run that saved it"
            )

    def load(self, more: Mapping[str, Any]) -> None:
        """Hand the module what ``more`` was; its own tensors have been filled."""
        extra = {f"{self._begin}{key}": value for key, value in more.items() if _is_extra(key)}
        for name, module in self._tree.keeping:
            key = f"{name}{_EXTRA}" if name == self._begin else f"{name}.{_EXTRA}"
            if key in extra:
                module.set_extra_state(extra[key])
        rest = {key: value for key, value in more.items() if not _is_extra(key)}
        if not rest:
            return
        content = dict(_state_dict(self.module))
        if all(_is_there(value, content.get(key)) for key, value in rest.items()):
            return
        own = {**self._tree.parameters, **self._tree.buffers}
        content = {key: own.get(self._begin + key, value) for key, value in content.items()}
        holders: list[dict[str, Any]] = [
            held
            for module in self._tree.modules
            for held in (module._parameters, module._buffers)
            if isinstance(held, dict)
        ]
        before = list(map(dict, holders))
        _load_state_dict(self.module, {**content, **more})
        for holder, held in zip(holders, before, strict=True):
            # A load that assigns parameters would leave the optimizer with those of before.
            holder.update({key: held[key] for key in held.keys() & {*holder}})


@cache
def _is_stock_class(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _ANSWERS)


def _is_extra(key: str) -> bool:
    return key == _EXTRA or key.endswith(f".{_EXTRA}")


def _state_dict(module: torch.nn.Module) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:  # an overriding method without that argument
        content = module.state_dict()
    return content


def _load_state_dict(module: torch.nn.Module, content: Mapping[str, Any]) -> None:
    try:
        # Not strict: some classes give more than they take back.
        module.load_state_dict(content, strict=False)
    except TypeError:  # as above
        module.load_state_dict(content)


def _is_there(value: Any, now: Any) -> bool:
    """True if the module keeps this very memory, which has been filled in place."""
    if not (isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)):
        return False
    before, after = places([value, now])
    return before == after
