"""Names and tensors of Megatron's model chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ft.trainer.module_tree import ModuleTree


def plain_name(name: str) -> str:
    """A parameter's name without the ``module.`` prefixes of Megatron's wrappers."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def module_tree(model: Sequence[Any]) -> ModuleTree:
    """Modules, parameters and buffers of this rank; chunks are the stages of a virtual pipeline.

    Buffers that no state dict would hold are among them: token counters of experts, for example,
    are not persistent and still decide how training goes on.
    """
    return ModuleTree(
        # Of the wrapped module: DistributedDataParallel.buffers is a list of gradient buffers.
        lambda: [getattr(chunk, "module", chunk) for chunk in model],
        lambda number, name: f"chunk{number}.{plain_name(name)}",
    )


def gather_weights(model: Sequence[Any]) -> None:
    """Send each data-parallel rank's updated weights to the others, and wait for theirs.

    A collective; only with the distributed optimizer, the other optimizers update all
    weights on every rank.
    """
    for chunk in model:
        chunk.start_param_sync(force_sync=True)
