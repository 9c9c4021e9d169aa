"""With how many ranks a training command can go on when it loses some.  Pure.

The ranks of a job say it when they register: only the framework's integration knows which
numbers of ranks its command works with, and only its own checkpoints can be loaded into
another number of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_ft.core.identity import Count

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]

STOP, HOLD, SHRINK = "stop", "hold", "shrink"
"""What ``on_no_spare`` may be."""


class RankRule(msgspec.Struct, frozen=True, array_like=True):
    """What numbers of ranks a command works with.

    They are multiples of ``multiple``; ``replica`` ranks hold one copy of the model, and an
    iteration has ``micro_batches``, which the copies must be able to share evenly.
    ``replica`` should divide ``multiple``.
    """

    multiple: Positive
    replica: Positive
    micro_batches: Count

    def against(self, ranks: int) -> str:
        """Why the command does not work with so many ranks, or nothing."""
        if ranks < 1 or ranks % self.multiple or ranks < self.replica:
            return f"{ranks} ranks are no multiple of {self.multiple}, the model-parallel size"
        copies = ranks // self.replica
        if self.micro_batches % copies:
            return (
                f"the {self.micro_batches} micro-batches of an iteration cannot be shared by "
                f"{copies} data-parallel ranks"
            )
        return ""
