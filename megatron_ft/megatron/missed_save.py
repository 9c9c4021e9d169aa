"""Megatron's own checkpoint of an iteration whose saving was broken off.

A snapshot is taken before Megatron saves, so a life may go on from the very iteration whose
checkpoint its predecessor did not finish, and pass no end of that iteration any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.disk.native import TRACKER
from megatron_ft.megatron.start import tracked_iteration


def is_missed(args: Any) -> bool:
    """Whether the checkpoint of the iteration that was restored is due and not there.

    Collective: the first rank looks.
    """
    from torch import distributed

    interval = getattr(args, "save_interval", None)
    if not getattr(args, "save", None) or not interval or args.iteration % interval:
        return False
    # A newer one means that this one was complete before.
    found = [tracked_iteration(Path(args.save, TRACKER))]
    distributed.broadcast_object_list(found, src=0)
    return bool(found[0] < args.iteration)


def save(args: Any, training: Mapping[str, Any]) -> None:
    """Save it as Megatron does; ``training`` are the arguments of its loop.  Collective."""
    from megatron.training import training as loop

    loop.save_checkpoint(
        args.iteration,
        training["model"],
        training["optimizer"],
        training["opt_param_scheduler"],
        args.num_floating_point_operations_so_far,
        checkpointing_context=training["checkpointing_context"],
        train_data_iterator=training["train_data_iterator"],
        preprocess_common_state_dict_fn=loop.preprocess_common_state_dict,
    )
