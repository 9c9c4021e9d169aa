"""Names and tensors of Megatron's model chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def plain_name(name: str) -> str:
    """A parameter's name without the ``module.`` prefixes of Megatron's wrappers."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def _named(chunk: Any, kind: str, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    # Of the wrapped module: DistributedDataParallel.buffers is a list of gradient buffers.
    module = getattr(chunk, "module", chunk)
    for name, tensor in getattr(module, kind)():
        yield f"chunk{number}.{plain_name(name)}", tensor


def named_parameters(model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """All parameters of this rank; chunks are the stages of a virtual pipeline.

    A tied weight appears once.
    """
    return {
        name: tensor
        for number, chunk in enumerate(model)
        for name, tensor in _named(chunk, "named_parameters", number)
    }


def named_buffers(model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """All buffers of this rank, those that no state dict would hold included.

    Token counters of experts, for example, are not persistent and still decide how
    training goes on.
    """
    return {
        name: tensor
        for number, chunk in enumerate(model)
        for name, tensor in _named(chunk, "named_buffers", number)
    }


def frozen_parameters(model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Parameters that no optimizer owns and so follow from nothing else."""
    return {n: p.detach() for n, p in named_parameters(model).items() if not p.requires_grad}


def gather_weights(model: Sequence[Any]) -> None:
    """Send each data-parallel rank's updated weights to the others, and wait for theirs.

    A collective; only with the distributed optimizer, the other optimizers update all
    weights on every rank.
    """
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def named_modules(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules of this rank, of all chunks."""
    for number, chunk in enumerate(model):
        for name, module in getattr(chunk, "module", chunk).named_modules():
            yield f"chunk{number}.{plain_name(name)}", module
