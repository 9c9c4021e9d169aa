"""The decision if a script may be handed an engine of another step than its own checkpoint's.

An engine from memory stands at the snapshot's step.  Whatever the script keeps outside the engine
(counters, schedulers, the position in the data) must come to the same step, or training goes wrong
without an error.  Only the script, or an adapter of it, can promise that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.config.json_section import FOLLOWS_ENGINE

_WITH_FUNCTION = (
    "give this state to deepspeed_ext.set_client_state(engine, function) before training, and set "
    "it from the client_state that engine.load_checkpoint returns at every start"
)


class Client(NamedTuple):
    """All that is known of the script around an engine.

    ``follows`` is True if its configuration says that it follows the engine's counters,
    ``provided`` if a function of it gives its state to each snapshot.  ``outside`` names what
    keeps state that no snapshot holds.
    """

    follows: bool = False
    provided: bool = False
    outside: Sequence[str] = ()


def objection(client: Client) -> str:
    """Why no snapshot may serve this client, and what to do about it; '' if one may."""
    if client.provided:
        return ""
    if client.outside:
        return (
            f"no snapshot holds the state of {', '.join(client.outside)}. For restarts from "
            f"memory {_WITH_FUNCTION}"
        )
    if client.follows:
        return ""
    return (
        "nothing says that the script follows the engine's step. If its loop and its data follow "
        f'from engine.global_steps, add "{FOLLOWS_ENGINE}": true to the inmem_snapshot section; '
        f"else {_WITH_FUNCTION}"
    )
