"""The Megatron-LM integration: flags, three wrapped functions, and Megatron's training state.

A training program calls :func:`install` once before Megatron parses its arguments; after
that ``--inmem-snapshot`` turns snapshots on.  Without the flag every wrapper passes
through.  See docs/how-to/megatron.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def install(*args: Any) -> None:
    from megatron_ft.megatron import hooks

    hooks.install(*args)
