"""Imports of the ranks of test_peers_cycles before they are forked."""

from __future__ import annotations

from benchmarks.peers import torch_own
from benchmarks.peers.rank import main

__all__ = ["main", "preload"]


def preload() -> None:
    """The way that is measured, too: ranks import it by its name."""
    assert torch_own.TorchSave
