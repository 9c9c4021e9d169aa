"""What a model holds that follows from no optimizer: buffers, frozen parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BUFFER, FROZEN = "buffer/", "frozen/"
"""Begin the names of captured buffers and of parameters that no optimizer owns."""


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer, those that no state dict would hold included; a shared one once."""
    return {f"{BUFFER}{name}": buffer.detach() for name, buffer in module.named_buffers()}


def frozen_parameters(
    module: torch.nn.Module, owned: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's part of all parameters but the ``owned`` ones, which follow from masters.

    These are the frozen ones, and trainable ones that the optimizer was not given.  A tied
    parameter appears once.
    """
    ids = {id(parameter) for parameter in owned}
    return {
        f"{FROZEN}{name}": _local(parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) not in ids
    }


def _local(parameter: torch.Tensor) -> torch.Tensor:
    # ZeRO-3 leaves an empty tensor in the model, and its partition beside it.
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.detach()
