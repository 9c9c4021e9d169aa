"""The state behind the interface that nvidia-resiliency-ext asks its users for.

The implementation that it ships takes CUDA tensors only.  Instances are pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from benchmarks.methods import State

_Base: Any = import_module(
    "nvidia_resiliency_ext.checkpointing.local.base_state_dict"
).TensorAwareStateDict


class CpuState(_Base):  # type: ignore[misc]
    """Tensors of host memory, by name."""

    def __init__(self, state: State) -> None:
        self.state: dict[str, Any] = dict(state)
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in state.values()]
        self._hollow = False

    def pop_tensors(self) -> list[torch.Tensor]:
        """The tensors, which are then no longer here."""
        taken = list(self.state.values())
        self.state, self._hollow = dict.fromkeys(self.state), True
        return taken

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors in their order."""
        return iter(self.state.values())

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""
        return self._hollow

    def insert_tensors(self, tensor_data: Any) -> None:
        """Put tensors back, in their order."""
        self.state = dict(zip(self.state, tensor_data, strict=True))
        self._hollow = False

    def init_tensors(self) -> None:
        """Room for tensors that will arrive."""
        self.insert_tensors(torch.empty(shape, dtype=kind) for shape, kind in self._shapes)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there; what writes afterwards is a fork, which copies on write."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They stay where they are."""
