"""Plain values that DeepSpeed keeps as attributes of optimizers and loss scalers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

PLAIN = bool | int | float | str | torch.dtype | None

WRAPPER_FIELDS = ("overflow", "clip_grad", "custom_loss_scaler", "external_loss_scale")
"""Attributes that wrappers have if they have the feature.  The user's limit on gradients is one
because DeepSpeed's own checkpoints of ZeRO-1 and 2 bring it back."""

_AUTOCAST_SCALER = "torch_autocast_gradscaler"


def plain_fields(holder: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attributes of ``holder`` that are plain values; only those of ``names`` if given."""
    found = vars(holder)
    chosen = found if names is None else [name for name in names if name in found]
    return {name: found[name] for name in chosen if isinstance(found[name], PLAIN)}


def set_fields(holder: Any, fields: Mapping[str, Any]) -> None:
    """Set what :func:`plain_fields` gave."""
    for name, value in fields.items():
        setattr(holder, name, value)


def wrapper_scalars(wrapper: Any, scaler: Any) -> dict[str, Any]:
    """Of an optimizer and of the object that holds its loss scale, None if it has none."""
    autocast = getattr(wrapper, _AUTOCAST_SCALER, None)
    return {
        "wrapper": plain_fields(wrapper, WRAPPER_FIELDS),
        "scaler": {} if scaler is None else plain_fields(scaler),
        "autocast_scaler": None if autocast is None else autocast.state_dict(),
    }


def load_wrapper_scalars(wrapper: Any, scaler: Any, scalars: Mapping[str, Any]) -> None:
    """Set what :func:`wrapper_scalars` gave, in the objects that are there."""
    set_fields(wrapper, scalars["wrapper"])
    if scaler is not None:
        set_fields(scaler, scalars["scaler"])
    autocast = getattr(wrapper, _AUTOCAST_SCALER, None)
    if autocast is not None and scalars["autocast_scaler"] is not None:
        autocast.load_state_dict(scalars["autocast_scaler"])
