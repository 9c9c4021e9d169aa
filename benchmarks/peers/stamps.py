"""Values that tell what a tensor was saved as: by which incarnation, of which rank, under which
name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

INCARNATIONS = 1 << 20
"""Values of one incarnation; sums of these are still exact in float32."""


def stamp(tensors: Iterable[torch.Tensor], rank: int, incarnation: int) -> None:
    """Fill every tensor with a value of its own; incarnations are counted from 0, at most 15 of
    them."""
    for number, tensor in enumerate(tensors):
        tensor.fill_(_value(rank, number, incarnation))


def stamped(tensors: Iterable[torch.Tensor], rank: int, incarnation: int) -> bool:
    """True if every value is what ``stamp`` wrote in that incarnation."""
    return all(
        bool((tensor == _value(rank, number, incarnation)).all())
        for number, tensor in enumerate(tensors)
    )


def _value(rank: int, number: int, incarnation: int) -> float:
    return float(INCARNATIONS * incarnation + 1000 * (rank + 1) + number)
