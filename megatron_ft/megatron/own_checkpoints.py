"""Megatron's own checkpoints in a run with snapshots: saves missed ones, notes one to resume from.

A snapshot is taken before Megatron saves, so an incarnation may resume from the very iteration
whose checkpoint its predecessor did not finish, and pass no end of that iteration any more.  That
checkpoint is saved once more.

Under ``--rerun-mode validate_results`` Megatron computes an iteration with an unexpected result
again.  If the result is the same, it saves a checkpoint of the iteration before, exits with 16, and
expects to be resumed from there, on another device if possible: what it has found out so far is in
the checkpoint, and in no snapshot.  Such a checkpoint is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.native import RESUME_NOTE, TRACKER, noted, tracked_iteration

log = logging.getLogger(__name__)

SAVING_NOTE = ".megatron-ft-saving"
"""File in the folder of ``--save``: the iteration whose checkpoint is tried once more."""


def is_missed(args: Any) -> bool:
    """True if the restored iteration's checkpoint is due, missing, and to be saved now.

    Collective: the first rank checks, and notes that it is tried.  That is done once, save for the
    last iteration: a disk that takes no checkpoint must not keep training from continuing.
    """
    from torch import distributed

    interval = getattr(args, "save_interval", None)
    if not getattr(args, "save", None) or not interval or args.iteration % interval:
        return False
    found = [distributed.get_rank() == 0 and _is_wanted(args)]
    distributed.broadcast_object_list(found, src=0)
    return found[0]


def save_missed(args: Any, training: Mapping[str, Any]) -> None:
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
    # With --async-save nothing is finished yet, and the try may still end this incarnation.
    if not getattr(args, "async_save", False):
        with suppress(OSError):
            Path(args.save, SAVING_NOTE).unlink()


def _is_wanted(args: Any) -> bool:
    # A newer one means that this one was complete before.
    if tracked_iteration(Path(args.save, TRACKER)) >= args.iteration:
        return False
    if args.iteration == args.train_iters or _is_first(
        Path(args.save, SAVING_NOTE), args.iteration
    ):
        return True
    log.warning("the checkpoint of iteration %d is left out: it broke off twice", args.iteration)
    return False


def _is_first(note: Path, iteration: int) -> bool:
    """True at the first try for ``iteration``, which is noted; False if the note fails."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        tried = note.exists() and note.read_text() == str(iteration)
        note.write_text(str(iteration))
    except OSError:
        return False
    return not tried


def note_save(args: Any, iteration: int) -> None:
    """Note on the first rank, before Megatron saves, whether to resume from this checkpoint."""
    from torch import distributed

    if not getattr(args, "save", None) or distributed.get_rank() != 0:
        return
    note = Path(args.save, RESUME_NOTE)
    # Training continues without the note: then memory serves, and finds the same result again.
    with suppress(OSError):
        if _is_doubtful():
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(iteration))
        elif noted(note.parent) == iteration:
            note.unlink()


def _is_doubtful() -> bool:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state = getattr(get_rerun_state_machine(), "state", None)
    return getattr(state, "name", "") == "WILL_RERUN_FROM_CHECKPOINT"
