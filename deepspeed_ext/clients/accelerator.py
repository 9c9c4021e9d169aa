"""accelerate.Accelerator with DeepSpeed or without: its whole state in snapshots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed_ext.client_state import CLIENT, set_client_state
from deepspeed_ext.hooks import run_of
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.accelerator_state import InMemoryState, number_saves
from megatron_ft.trainer.manager import SnapshotManager

NAME = "accelerate.Accelerator"


def in_memory_state(accelerator: Any, **options: Any) -> InMemoryState:
    """Make the InMemoryState of an accelerator's backend; ConfigError as of the classes."""
    uses_deepspeed = accelerator.distributed_type.value == "DEEPSPEED"
    return (EngineMemory if uses_deepspeed else InMemoryState)(accelerator, **options)


class EngineMemory(InMemoryState):
    """InMemoryState of an accelerator with a DeepSpeedPlugin, whose engine takes the snapshots.

    ConfigError without one prepared engine that takes snapshots.
    """

    def _connect(self, manager: SnapshotManager | None) -> None:
        engines = [(model, run_of(model)) for model in self._accelerator._models]
        found = [(model, run) for model, run in engines if run is not None]
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} prepared models take snapshots: InMemoryState needs one, prepared "
                'with a DeepSpeedPlugin whose config has "inmem_snapshot"'
            )
        ((self._engine, self._run),) = found
        self._run.leave_ends_to_client()
        set_client_state(self._engine, self._entries)

    def resume(self, checkpoint: str | None = None) -> int:
        state = self._run.serve(NAME, checkpoint or os.devnull)
        if state is not None:
            for part, stored in zip(self._parts(), state["parts"], strict=True):
                part.load_state_dict(stored)
            self._accelerator.step = state["step"]
        elif checkpoint is not None:
            self._accelerator.load_state(checkpoint)
        number_saves(self._accelerator)
        return int(self._engine.global_steps)

    def save(self) -> None:
        """An iteration has ended."""
        self._run.refuse(self._unready())
        self._run.end_iteration()

    def close(self, *, finished: bool | None = None) -> None:
        if finished is not None:
            self._run.plan_ended(finished)
        self._run.close()

    def _parts(self) -> list[Any]:
        """All but the engine that has a state, in an order that every incarnation has."""
        own = getattr(self._engine, "lr_scheduler", None)
        schedulers = [one for one in self._accelerator._schedulers if one.scheduler is not own]
        return [*schedulers, *self._accelerator._custom_objects]

    def _entries(self) -> Mapping[str, Any]:
        parts = [part.state_dict() for part in self._parts()]
        return {CLIENT: NAME, "parts": parts, "step": self._accelerator.step}
