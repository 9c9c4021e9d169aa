"""The checkpoint that the script names when it loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed_ext import saving
from megatron_ft.trainer.start_choice import WISH


class Wish:
    """The folder, tag and step of what the script named, kept in each snapshot.

    A tag without its folder names nothing: some clients save every checkpoint with one tag, each
    in a folder of its own.  And one name may have been saved again, with a later step.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._tag: str | None = None
        self._step = -1

    def name(self, folder: str, tag: str | None) -> None:
        """The script asks for this, the newest of the folder if ``tag`` is None."""
        self._folder, self._tag = os.path.realpath(folder), tag

    def is_new(self, found: str, step: int, offered: int, objects: Mapping[str, Any]) -> bool:
        """True if the script wants another checkpoint than in the incarnation of the snapshot.

        ``found`` and ``step`` (-1: nothing is there) are of what DeepSpeed would load,
        ``offered`` and ``objects`` of the snapshot.  A checkpoint that its own lineage has
        saved since, under the name that was given before or as the newest, is no other.
        """
        self._step = -1 if self._tag is None else step
        before = objects.get(WISH) or {}
        same_name = (before.get("folder"), before.get("tag")) == (self._folder, self._tag)
        if step < 0 or (same_name and self._step == before.get("step")):
            return False
        saved = saving.Saved(self._folder, found, step)._asdict()
        own = objects.get(saving.NAME) == saved and step <= offered
        return not (own and (same_name or self._tag is None))

    def state_dict(self) -> dict[str, Any]:
        """The names and the step; -1 without a tag, as the newest one changes."""
        return {"folder": self._folder, "tag": self._tag, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: each incarnation asks for itself."""
