"""What ends the rebuild of lost shards, among all that nodes tell meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.checkpoint.decide import Decision, StripeState
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.expected_encoders import ExpectedEncoders
from megatron_ft.supervisor.restore import RebuildError, RestorePlan
from megatron_ft.supervisor.restore import rebuild as rebuild_lost
from megatron_ft.supervisor.slot_choice import SlotChoice

INCARNATION, WORLD, SNAPSHOT = 4, "w4", SnapshotId(3, 7)
STRIPE = StripeState("xor", 1, 1, 1 << 20, ("dp0", "dp1"), 4096)
PLAN = RestorePlan(
    decision=Decision(SNAPSHOT, 30, True, (STRIPE,), {STRIPE: ("dp1",)}),
    places={"dp0": "n0", "dp1": "n1"},
    active=("n0", "n1"),
    incarnation=INCARNATION,
    lineage=(),
    slots=SlotChoice(2),
)
RECORD = SealedRecord("dp1", SNAPSHOT, 30, 0, 0, 0, 0, 0, bytes(32), bytes(32))
REBUILT = m.Rebuilt(SNAPSHOT, WORLD, "dp1", RECORD, bytes(32), (), 0, 0.0)


class Nodes:
    """Answers a rebuild by these events, whoever listens."""

    def __init__(self, *bodies: Any) -> None:
        self._listeners: tuple[Callable[[m.NodeEvent], None], ...] = ()
        self._bodies = bodies

    def listening(self, *listeners: Callable[[m.NodeEvent], None]) -> AbstractContextManager[None]:
        self._listeners = listeners
        return nullcontext()

    async def ask_all(self, requests: Mapping[str, m.Message]) -> dict[str, object]:
        for body in self._bodies:
            for listener in self._listeners:
                listener(m.NodeEvent("n0", INCARNATION, body))
        return {}


def rebuild(*bodies: Any) -> None:
    async def story() -> None:
        encoders = ExpectedEncoders(Observers(), lambda name: None)
        encoders.expect(WORLD, ())
        job: Any = SimpleNamespace(fleet=Nodes(*bodies), encoders=encoders, emit=Observers().emit)
        await asyncio.wait_for(rebuild_lost(job, PLAN, SNAPSHOT), 10)

    asyncio.run(story())


def test_what_is_told_late_of_other_encoders_ends_no_rebuild() -> None:
    rebuild(
        m.WriterGone("encoder", "w3", 7),
        m.WriterGone("trainer", WORLD, 7),
        m.OrderFailed(SNAPSHOT, "w3", "it broke", "dp0"),
        REBUILT,
    )


@pytest.mark.parametrize(
    "body", [m.OrderFailed(SNAPSHOT, WORLD, "it broke", "dp0"), m.WriterGone("encoder", WORLD, 7)]
)
def test_what_these_encoders_tell_ends_it(body: Any) -> None:
    with pytest.raises(RebuildError) as error:
        rebuild(body)
    assert error.value.corrupt == getattr(body, "corrupt", "")
