"""Checkpoints that Megatron saves to be resumed from, because a result was doubtful.

Under ``--rerun-mode validate_results`` Megatron computes an iteration with an unexpected result
again. If the result is the same, it saves a checkpoint of the iteration before, exits with 16, and
expects to be resumed from there, on another device if possible: what it has found out so far is in
the checkpoint, and in no snapshot.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.native import NOTE, noted


def note_save(args: Any, iteration: int) -> None:
    """Megatron is about to save this iteration: the first rank notes whether it is such a one."""
    from torch import distributed

    if not getattr(args, "save", None) or distributed.get_rank() != 0:
        return
    note = Path(args.save, NOTE)
    # Training goes on without the note: then memory serves, and finds the same result again.
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
