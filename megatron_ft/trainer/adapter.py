"""The state that a program passes, as what captures and restores work on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.state import TrainingState

State = Mapping[str, Any] | TrainingState


class StateAdapter:
    """Makes a TrainingState of a mapping, once for each mapping; passes a TrainingState on.

    ``replicated`` maps prefixes of tensor names to the process group whose ranks hold equal bits.
    """

    def __init__(self, replicated: Mapping[str, Any] | None = None) -> None:
        self._replicated = replicated
        self._adapted: MappingState | None = None

    def __call__(self, state: State) -> TrainingState:
        """The adapter of this very mapping, with what it has learned of its tensors."""
        if not isinstance(state, Mapping):
            return state
        if self._adapted is None or not self._adapted.adapts(state):
            self._adapted = MappingState(state, replicated=self._replicated)
        return self._adapted

    def forget_tensors(self) -> None:
        """Let the adapter of a mapping let go of its tensors; a TrainingState does so itself."""
        if self._adapted is not None:
            self._adapted.forget_tensors()
