"""A pass over data that begins behind a restore, and so draws from the states just restored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_OWN = "deepspeed_ext.resumable_loader"
"""The module whose loaders put the states of the generators back."""


class LateIterators:
    """Tells of the first DataLoader that is iterated between ``begin`` and ``end``.

    torch draws a seed for the workers when an iterator is made, and a shuffling sampler draws its
    order.  In the run that was lost both had happened before the snapshot, so after a restore
    dropout would draw other numbers.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._original: Any = None

    def begin(self) -> None:
        """Watch torch's DataLoader, if the process has it."""
        data = sys.modules.get("torch.utils.data")
        if data is None or self._original is not None:
            return
        original = self._original = data.DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            if not _called_from_own():
                self._tell()
            return original(loader)

        data.DataLoader.__iter__ = iterate

    def end(self) -> None:
        """Watch no longer; a second call does nothing."""
        original, self._original = self._original, None
        if original is not None:
            sys.modules["torch.utils.data"].DataLoader.__iter__ = original


def _called_from_own() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != _OWN:
        frame = frame.f_back
    return frame is not None
