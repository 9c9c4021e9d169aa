"""How one request reaches many nodes, and their reports come back: SMPs pass them on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_ft.identity import Count, SnapshotId
from megatron_ft.smp.message_base import Message, Name

Endpoint = Annotated[str, msgspec.Meta(pattern="^tcp://", max_length=256)]
Patience = Annotated[float, msgspec.Meta(ge=0, le=60)]


class Onward(msgspec.Struct, frozen=True):
    """``frame`` is a PassOn for the SMP of ``node``, encoded: who passes it on need not read it."""

    node: Name
    endpoint: Endpoint
    frame: bytes


class PassOn(Message, frozen=True):
    """``request`` is for the SMP of ``node``, as a frame; ``below`` are to be sent to others.

    The answers of these are waited for ``patience`` seconds.
    """

    incarnation: int
    node: Name
    request: bytes
    below: tuple[Onward, ...]
    patience: Patience


class Passed(Message, frozen=True):
    """Answer to PassOn: nodes that answered Ok, and the frames with which others answered.

    Whoever is in neither has not answered in time.
    """

    done: tuple[str, ...]
    others: dict[str, bytes]


class Gathered(Message, frozen=True):
    """Reports on ``snapshot`` of ``node`` and of those below it: Events, encoded.

    ``whole``: this is all of the branch, nothing of this round is missing.
    """

    incarnation: Count
    node: Name
    snapshot: SnapshotId
    whole: bool
    frames: tuple[bytes, ...]
