"""Arguments that must not change between lives, though every tensor would still fit.

They are those that Megatron compares when it loads a checkpoint of its own
(``check_checkpoint_args`` in megatron/training/checkpointing.py): with another number of heads,
say, the same weights are another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ft.core.errors import LayoutMismatchError

_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
_VOCABULARY = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
"""Compared if there is a ``--vocab-file``."""


def capture(args: Any) -> dict[str, Any]:
    """Their values, for a snapshot."""
    names = (*_MODEL, *(_VOCABULARY if getattr(args, "vocab_file", None) else ()))
    return {name: getattr(args, name, None) for name in names}


def check(args: Any, captured: Mapping[str, Any]) -> None:
    """Raise LayoutMismatchError that lists each one that is not as it was ``captured``."""
    changed = [
        f"--{name.replace('_', '-')} was {captured[name]} and is {value}"
        for name, value in capture(args).items()
        if name in captured and captured[name] != value
    ]
    if changed:
        raise LayoutMismatchError(
            f"the snapshot is of another model, though its tensors fit: {'; '.join(changed)}. "
            "Run with the old flags, or remove the job's snapshots with `megatron-ft clean`"
        )
