"""What DeepSpeed's files hold beside plain tensors and values, for engines that trip over it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def detached(tree: Any) -> Any:
    """The same nested dicts, lists and tuples with tensors that belong to no graph.

    ZeRO-1 and 2 hand over slices of tensors that require grad, which cannot be sent to
    another process.  Storage is shared with what was given.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return type(tree)((key, detached(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(detached(value) for value in tree)
    return tree


def safe_to_load() -> AbstractContextManager[Any]:
    """Let ``torch.load(weights_only=True)`` read the classes that DeepSpeed itself puts into files.

    The fast and decoupled engines load this way and reject what they wrote.  Before torch 2.5
    there is no way to allow classes, nor is there a need: the default was to read everything.
    """
    allow = getattr(torch.serialization, "safe_globals", None)
    return nullcontext() if allow is None else allow(_own_classes())


def _own_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, set]
