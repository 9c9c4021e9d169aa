"""A SnapshotPump with a Fleet of its own, of a job that no supervisor runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.expected_encoders import ExpectedEncoders
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.snapshots import SnapshotPump
from megatron_ft.supervisor.standing import Standing
from tests.support.smp_node import SECRET


def fleet(timing: Timing | None = None, observers: Observers | None = None) -> Fleet:
    return Fleet(JobKeys.derive(SECRET), observers or Observers(), timing or Timing())


def pump(
    timing: Timing | None = None,
    observers: Observers | None = None,
    kill: Callable[[str], None] = lambda world: None,
) -> SnapshotPump:
    of = fleet(timing, observers)
    encoders = ExpectedEncoders(of.observers, kill)
    return SnapshotPump(of, Standing(DamagedShards(of.observers)), encoders)


def answer(node: str, **said: Any) -> m.LeaseAnswer:
    """The answer of a node to a heartbeat."""
    usual: dict[str, Any] = {"paused": False, "progress": {}, "encoder_world": "", "clock": 1.0}
    return m.LeaseAnswer(node, **usual | said)
