"""Values that tell what a tensor was saved as: by which life, of which rank, under which name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LIVES = 1 << 20
"""Values of one life; sums of these are still exact in float32."""


def stamp(tensors: Iterable[torch.Tensor], rank: int, life: int) -> None:
    """Fill every tensor with a value of its own; lives are counted from 0, at most 15 of them."""
    for number, tensor in enumerate(tensors):
        tensor.fill_(_value(rank, number, life))


def stamped(tensors: Iterable[torch.Tensor], rank: int, life: int) -> bool:
    """Whether every value is what ``stamp`` has written in that life."""
    return all(
        bool((tensor == _value(rank, number, life)).all()) for number, tensor in enumerate(tensors)
    )


def _value(rank: int, number: int, life: int) -> float:
    return float(LIVES * life + 1000 * (rank + 1) + number)
