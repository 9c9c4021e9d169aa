"""Why an SMP refuses a request; the name travels with the answer."""

from __future__ import annotations

from megatron_ft.core.errors import MegatronFTError


class TransitionRefusedError(MegatronFTError):
    """The slot is not in a state in which the request makes sense; nothing was changed."""


class PinnedError(TransitionRefusedError):
    """There would be room for a snapshot if a reader did not hold what lies there."""


class WorldGoneError(TransitionRefusedError):
    """The message belongs to an encoder world that is not, or no longer, the node's."""
