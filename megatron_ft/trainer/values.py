"""Small things about values that snapshots hold: copies on the host, and equality of bits."""

from __future__ import annotations

import copy
from typing import Any

import torch


def host_copy(value: Any) -> Any:
    """The value with every tensor in it copied to the host, detached from the live one.

    Containers are copied, whatever their class; other objects are not.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, inner in value.items():
            made[key] = host_copy(inner)  # not update(): a Counter's would add
        return made
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(host_copy(inner) for inner in value)
    if isinstance(value, list | tuple):
        return type(value)(host_copy(inner) for inner in value)
    return value


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if both hold the same bytes; a NaN equals itself, -0.0 is not 0.0."""
    left, right = (t.detach().contiguous().view(-1) for t in (left, right))
    if not left.numel():
        return left.shape == right.shape and left.dtype == right.dtype
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
