"""What DeepSpeed itself would save, asked for once: the trees that it hands to an engine for files.

No file is written, no tensor is copied, nothing is communicated.  Everything about names and
formats is DeepSpeed's own answer, so nothing of it is repeated here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ROOT, TAG = "root", "tag"


def record(engine: Any) -> dict[str, Any]:
    """What this rank would save, by the name of the file in the checkpoint's folder.

    The trees hold live tensors and objects.  Whatever DeepSpeed raises comes through.
    """
    recorder = _Recorder(engine.checkpoint_engine)
    stand_ins = {
        "checkpoint_engine": recorder,
        "_copy_recovery_script": lambda _folder: None,
        "_get_param_fragment_func": _frozen_fragment,
    }
    with _replaced(engine, stand_ins), _NoCopies():
        save = engine._save_moe_checkpoint if engine.has_moe_layers else engine._save_checkpoint
        save(ROOT, TAG)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(ROOT, TAG)
    return recorder.files


def _frozen_fragment(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter that the optimizer does not own, where it is."""
    held = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
    return held.detach()  # type: ignore[no-any-return]


class _Recorder:
    """Stands in for DeepSpeed's CheckpointEngine and keeps what it is asked to save."""

    def __init__(self, real: Any) -> None:
        self.files: dict[str, Any] = {}
        self._real = real

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the tree under its path relative to the checkpoint's folder."""
        self.files[os.path.relpath(path, os.path.join(ROOT, TAG))] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As the engine that saves later."""
        return bool(self._real.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """As the engine that saves later: it decides what DeepSpeed copies, tuples included."""
        return bool(self._real.preserves_storage_sharing())


class _NoCopies(TorchFunctionMode):
    """What copies a tensor gives the tensor: that DeepSpeed copies it does not show in a file."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        moved = func is torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.device)
        if moved or func in (torch.Tensor.clone, torch.clone, torch.Tensor.cpu):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced(holder: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of one object replaced for a while."""
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    vars(holder).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(holder)[name]
        vars(holder).update(before)
