"""State that training keeps outside the engine, as far as it shows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.trainer.clients import active_clients

NAME = "outside"
"""Name of :class:`Outside` among the parts of a snapshot."""

_SCHEDULER_MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""What torch's schedulers leave at the ``step`` of their optimizer; the second up to torch 2.3."""


class Outside:
    """Names the clients, schedulers and optimizers around one engine; goes into each snapshot.

    Some of it shows only in training: a scheduler may be made after the load, a second
    optimizer is known when it steps.  So a later incarnation reads of it in the snapshot.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._found: set[str] = set()
        self._hook: Any = None
        self.look()

    def look(self) -> list[str]:
        """Everything that was found so far, now included."""
        self._found |= active_clients()
        if self._has_foreign_scheduler():
            self._found.add("a learning rate scheduler that deepspeed.initialize did not get")
        return sorted(self._found)

    def watch_optimizers(self, own: Callable[[], list[Any]]) -> None:
        """See every optimizer of torch that steps from now on; ``own`` gives the engine's."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        known = weakref.WeakSet(own())

        def stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if optimizer not in known and optimizer not in own():
                self._found.add(f"a second optimizer ({type(optimizer).__name__})")
            known.add(optimizer)

        self._hook = register_optimizer_step_pre_hook(stepping)

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """The names."""
        return {"found": self.look()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each incarnation looks for itself."""

    def _has_foreign_scheduler(self) -> bool:
        from torch.optim.lr_scheduler import LRScheduler

        step = getattr(getattr(self._engine, "basic_optimizer", None), "step", None)
        marked = any(hasattr(step, mark) for mark in _SCHEDULER_MARKS)
        return marked and not isinstance(self._engine.lr_scheduler, LRScheduler)
