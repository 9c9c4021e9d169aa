"""What a snapshot's cycle wants done; the coordinator does it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m


@dataclass(frozen=True)
class Send:
    """Send a request to a node's SMP and report its answer to ``answered``."""

    node: str
    message: m.Message


@dataclass(frozen=True)
class KillWorld:
    """End an encoder world; its encoders' deaths arrive as WriterGone events."""

    world: str
    reason: str


@dataclass(frozen=True)
class Ended:
    """A snapshot is over: ``level`` is protected, local or aborted; ``last`` if training is too.

    ``gated`` says that it was given up because of the loss, ``again`` that it had been committed
    as local before and was to get parity.  ``corrupt`` are shards whose bytes encoders found wrong.
    """

    snapshot: SnapshotId
    iteration: int
    level: str
    reason: str = ""
    last: bool = False
    gated: bool = False
    again: bool = False
    corrupt: frozenset[str] = frozenset()


Action = Send | KillWorld | Ended
