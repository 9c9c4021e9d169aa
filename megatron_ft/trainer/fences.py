"""The fences of a process: every optimizer passes one before it steps, without being registered.

torch calls a hook of ours before the step of any of its optimizers: also of one that is made later,
that replaces another, or that is not in the state.  An object of the state that takes such hooks
itself, and is not an optimizer of torch, is given one at each capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_HOOKS = "_optimizer_step_pre_hooks"
"""torch's name for the hooks of an optimizer; a wrapper that has none steps another."""


class Fences:
    """Calls ``before_step`` once before each step of an optimizer."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step
        self._handles: list[Any] = []
        self._others: list[Any] = []

    def open(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._any_step))

    def add(self, optimizer: Any) -> Any:
        self._others.append(optimizer)
        while isinstance(optimizer, Optimizer) and not hasattr(optimizer, _HOOKS):
            optimizer = getattr(optimizer, "optimizer")  # noqa: B009 - a wrapper, as of Accelerate
        handle = optimizer.register_step_pre_hook(self._own_step)
        self._handles.append(handle)
        return handle

    def cover(self, state: Mapping[str, Any]) -> None:
        """Fence what torch's own hook does not see among the values of a state."""
        values = state.values()
        hooked = {kind for kind in {*map(type, values)} if hasattr(kind, "register_step_pre_hook")}
        for value in values if hooked else ():
            if type(value) in hooked and not isinstance(value, Optimizer):
                if not any(value is known for known in self._others):
                    self.add(value)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._others.clear()

    def _own_step(self, *_: Any) -> None:
        self._before_step()

    def _any_step(self, optimizer: Any, *_: Any) -> None:
        if self._own_step not in getattr(optimizer, _HOOKS).values():
            self._before_step()
