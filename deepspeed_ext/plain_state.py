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

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, set]
    return [*classes, (_stage, "builtins.getattr")] if _members_by_getattr() else classes


def _members_by_getattr() -> bool:
    """Whether this Python (3.11.0 to 3.11.3) pickles an enumeration's member by getattr."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum.weights.__reduce_ex__(2)[0] is getattr


def _stage(kind: type[Any], name: str) -> Any:
    """What those files get for getattr: the real one would give them all that Python can do."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is not ZeroStageEnum:
        raise TypeError(f"this file asks for {name} of {kind}; only a ZeRO stage can be asked for")
    return ZeroStageEnum[name]
