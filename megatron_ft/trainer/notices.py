"""Lines for a user at the first save: the content of snapshots, and what a restart loses."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Collection
from itertools import islice
from types import FrameType

from megatron_ft.core.shard import ShardLayout
from megatron_ft.trainer.state import KnowsMemory, Lost, TrainingState, TrainsInPlace
from megatron_ft.trainer.stats import Warner

logger = logging.getLogger(__name__)

MOST_NAMED = 8
"""Names in one line; it says how many more there are."""

_LIBRARIES = {
    "accelerate": "accelerate.Accelerator",
    "composer": "composer.Trainer",
    "lightning": "lightning.Trainer",
    "lightning_fabric": "lightning.Fabric",
    "pytorch_lightning": "lightning.Trainer",
    "transformers": "transformers.Trainer",
}
"""Names in messages, by package."""


def active_clients() -> set[str]:
    """Libraries that called this, through whatever is between, or hold the process's state.

    An import alone means nothing: many models come with transformers, and that imports
    accelerate.  So the callers count, and an Accelerator if there is one.
    """
    found: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _LIBRARIES:
            found.add(_LIBRARIES[package])
        frame = frame.f_back
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized():
        found.add(_LIBRARIES["accelerate"])
    return found


_said: list[bool] = []
"""Not empty once this process has printed the content of its snapshots."""


def some(names: Collection[str]) -> str:
    more = f"; and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(islice(names, MOST_NAMED)) + more


def say_what_is_captured(
    shard_id: str, state: TrainingState, layout: ShardLayout, warn: Warner
) -> None:
    """Print one line, once in a process, and warn of what a restart loses."""
    if _said:
        return
    _said.append(True)
    owners = [entry for entry in layout.entries if not entry.alias_of]
    begins = Counter(re.split("[/.]", entry.name, maxsplit=1)[0] for entry in owners)
    most = ", ".join(f"{count} of {name}" for name, count in begins.most_common(4))
    size = sum(entry.nbytes for entry in owners)
    text = f"megatron-ft: snapshots of {shard_id} hold {len(owners)} tensors, {size} bytes: {most}"
    if isinstance(state, KnowsMemory) and (derived := state.derived()):
        size = sum(tensor.nbytes for tensor in derived.values())
        text += f"; derived in a restore: {len(derived)} weights, {size} bytes"
    if isinstance(state, TrainsInPlace) and (out := state.left_out()):
        text += f"; left out: {some(out)}"
    print(text, file=sys.stderr)
    lost = _restart_losses(state)
    if lost.objects:
        warn(
            "restart losses", "a restart loses the state of %s: %s", some(lost.objects), lost.advice
        )


def _restart_losses(state: TrainingState) -> Lost:
    """Objects that are not captured; an examination of all objects of a process may fail."""
    try:
        return state.restart_losses() if isinstance(state, KnowsMemory) else Lost([], "")
    except Exception:
        logger.info("the search for objects that are not captured has failed", exc_info=True)
        return Lost([], "")


def warn_of_clients(warn: Warner) -> None:
    """A library's own state is in a snapshot only if the mapping has it."""
    if found := active_clients():
        warn(
            "clients",
            "%s keeps training state of its own: the count of steps, schedules, the position "
            "in the data. A snapshot holds what its mapping names and nothing else. After "
            "a restore the script has to bring all the rest to the restored iteration",
            ", ".join(sorted(found)),
        )
