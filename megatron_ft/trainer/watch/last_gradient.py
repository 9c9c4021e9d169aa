"""When the last gradient of a backward pass is there: the end of a rank's own part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

LEARNING_STEPS = 2
"""Which parameter is last does not change; DDP orders its buckets anew after the first step."""


class LastGradient:
    """Calls ``passed`` when the parameter that gets its gradient last has got it.

    For some steps all parameters have a hook (``register_post_accumulate_grad_hook`` of
    PyTorch), then only the last one.  On a device the host runs ahead of the gradients, so a
    time taken here says nothing: parameters that are not on the CPU are not followed.
    """

    def __init__(self, passed: Callable[[], None]) -> None:
        self._passed = passed
        self._hooks: dict[int, Any] = {}
        self._last = -1
        self._steps = 0

    def follow(self, parameters: Iterable[Any]) -> None:
        """Hook the parameters that get gradients; those of an earlier call stay."""
        for parameter in parameters:
            if not _gets_gradients(parameter) or id(parameter) in self._hooks:
                continue
            with suppress(RuntimeError):
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(
                    self._arrived
                )
                self._steps = 0

    def settle(self) -> None:
        """A step begins: what came last before it is known."""
        if self._last < 0 or self._steps > LEARNING_STEPS:
            return
        self._steps += 1
        if self._steps > LEARNING_STEPS:
            for key in [key for key in self._hooks if key != self._last]:
                self._hooks.pop(key).remove()

    def forget(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _arrived(self, parameter: Any) -> None:
        self._last = id(parameter)
        self._passed()


def _gets_gradients(parameter: Any) -> bool:
    known = getattr(parameter, "register_post_accumulate_grad_hook", None) is not None
    return known and parameter.is_leaf and parameter.requires_grad and parameter.is_cpu
