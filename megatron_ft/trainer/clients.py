"""Training libraries that run a loop of their own, with state that nobody else knows."""

from __future__ import annotations

import sys
from types import FrameType

_LIBRARIES = {
    "accelerate": "accelerate.Accelerator",
    "composer": "composer.Trainer",
    "lightning": "lightning.Trainer",
    "lightning_fabric": "lightning.Fabric",
    "pytorch_lightning": "lightning.Trainer",
    "transformers": "transformers.Trainer",
}
"""By package, what a message calls it."""


def active_clients() -> set[str]:
    """Libraries that called this, through whatever is between, or hold the process's state.

    To have imported one means nothing: many models come with transformers, and that imports
    accelerate.  So the callers are looked at, and if there is an Accelerator.
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
