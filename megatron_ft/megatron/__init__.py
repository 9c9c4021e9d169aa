"""The Megatron-LM integration: flags, three wrapped functions, and Megatron's training state.

A training program calls :func:`install` once before Megatron parses its arguments; after
that ``--inmem-snapshot`` turns snapshots on.  Without the flag every wrapper passes
through.  See docs/megatron.md.
"""

from __future__ import annotations

from megatron_ft.megatron.hooks import install

__all__ = ["install"]
