"""How one request reaches many nodes: an SMP takes its own and passes the others' on."""

from __future__ import annotations

from typing import Annotated

import msgspec

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
