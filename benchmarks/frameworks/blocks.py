"""A model of many small parameters, whose time is Python's rather than the processor's."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64
"""Weights of 16 KiB."""

BLOCKS = 42
"""504 parameters, with what AdamW keeps of each 2,016 tensors."""


class Block(nn.Module):
    """The parameters of a transformer's layer: twelve in six modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of ``hidden``, (samples, WIDTH), as many."""
        hidden = hidden + self.projection(self.attention(self.before_attention(hidden)))
        changed: torch.Tensor = hidden + self.down(self.up(self.before_mlp(hidden)))
        return changed


def model() -> nn.Module:
    """All blocks, one after the other."""
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def samples(device: str = "cpu") -> torch.Tensor:
    """What it is trained with: (8, WIDTH)."""
    return torch.ones(8, WIDTH, device=device)
