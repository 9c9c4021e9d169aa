"""Messages of any content, in any state: refused or carried out, never another exception."""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.arena import binary
from megatron_ft.arena.format import Permit, SlotHeader
from megatron_ft.core.errors import (
    ArenaError,
    ConfigError,
    ControlPlaneError,
    LayoutMismatchError,
    MegatronFTError,
    NoRoomError,
    PinnedError,
    StaleIncarnationError,
)
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.smp.effects import StorePermit, StoreSlot
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import REACTIONS, NodeMachine
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.schedule import Schedule
from tests.support.arena_samples import make_header, make_slot
from tests.support.message_samples import Maker

PIDS = (1,)
HANDLED = list(REACTIONS)
WRITERS = ("trainer_joined dp0", "trainer_gone dp0", "encoder_joined w1", "encoder_gone w1")
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, (1 << 63) - 1)


def machine() -> NodeMachine:
    node = NodeMachine("n0", highest_incarnation=1)
    for shard_id in ("dp0", "dp1"):
        node.shards[shard_id] = ShardSlots(shard_id, [SlotHeader(), SlotHeader()])
        node.paths[shard_id] = f"/{shard_id}"
    return node


@quick
@given(seed=seeds)
def test_any_frame_is_a_message_or_an_error_of_ours(seed: int) -> None:
    maker = Maker(seed, PIDS)
    for _ in range(50):
        try:
            message = m.decode(maker.frame())
        except ControlPlaneError:
            continue
        # Compared as text: a value that is no number does not equal itself.
        assert repr(m.decode(m.encode(message))) == repr(message)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\xa1x" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
        b"\xc1",
    ],
)
def test_frames_that_claim_too_much(frame: bytes) -> None:
    with pytest.raises(ControlPlaneError):
        m.decode(frame)


@quick
@given(seed=seeds)
def test_valid_messages_in_any_order(seed: int) -> None:
    """Every answer is a message, and every header and permit that follows can be stored."""
    node, maker = machine(), Maker(seed, PIDS)
    for _ in range(60):
        if maker.random.random() < 0.25:
            change_writers(node, maker.random.choice(WRITERS))
        else:
            assert isinstance(node.handle(maker.valid(HANDLED)), m.Message)
        store(node)


def change_writers(node: NodeMachine, step: str) -> None:
    """What the SMP does when writers come and go; it never registers two encoders."""
    action, *who = step.split()
    if action.endswith("joined"):
        if action == "trainer_joined" or not node.world:
            getattr(node, action)(*who)
    elif who[0] in node.trainers or who[0] == node.world:
        getattr(node, action)(*who, 1)


def store(node: NodeMachine) -> None:
    for effect in node.take_effects():
        if isinstance(effect, StoreSlot):
            assert binary.unpack_slot(binary.pack(effect.header)) == effect.header
        elif isinstance(effect, StorePermit):
            assert binary.unpack_permit(binary.pack(effect.permit)) == effect.permit


@quick
@given(seed=seeds)
def test_the_coordinator_hears_any_events_in_any_order(seed: int) -> None:
    cycle, maker = SnapshotCycle(1, {"dp0": "n0", "dp1": "n1"}, (), Schedule(1)), Maker(seed, PIDS)
    ranks, damage = Registration(2), DamagedShards(Observers())
    for _ in range(50):
        cycle.propose(cycle.iteration, maker.random.choice(["w1", ""]))
        event = maker.valid([m.NodeEvent])
        assert isinstance(event, m.NodeEvent)
        cycle.handle(event.node, event.body)
        ranks.on_event(event)
        ranks.missing_ranks()
        damage.on_event(event)


@quick
@given(raw=st.binary(max_size=400), at=st.integers(0, 400))
def test_headers_and_permits_of_any_bytes(raw: bytes, at: int) -> None:
    permit = Permit(SnapshotId(7, 92), 1240, 1)
    for unpack, good in (
        (binary.unpack_slot, binary.pack(make_slot())),
        (binary.unpack_permit, binary.pack(permit)),
        (binary.unpack_header, binary.pack_header(make_header())),
    ):
        with suppress(ArenaError):
            unpack(good[:at] + raw + good[at + len(raw) :])


ERRORS = [ConfigError, LayoutMismatchError, NoRoomError, PinnedError, StaleIncarnationError]


@pytest.mark.parametrize("kind", ERRORS)
def test_refused_brings_an_error_of_its_class_and_text(kind: type[MegatronFTError]) -> None:
    found = m.decode(m.encode(m.Refused(kind("slot 1 is read"))))
    assert type(found.error) is kind and found.reason == "slot 1 is read"


def test_decode_takes_a_class_that_is_not_ours_for_a_refusal() -> None:
    found = m.decode(m.encode(m.Unfit("dp0", type("OtherError", (MegatronFTError,), {})("odd"))))
    assert type(found.error) is ControlPlaneError and str(found.error) == "odd"


@pytest.mark.parametrize("error", ["PinnedError", ["PinnedError"], ["PinnedError", 7], {}, None])
def test_decode_refuses_what_is_no_error(error: object) -> None:
    with pytest.raises(ControlPlaneError, match="unreadable control message"):
        m.decode(msgspec.msgpack.encode({"type": "Refused", "error": error}))
