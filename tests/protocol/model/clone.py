"""Cheap copies of a World: what can change is copied, everything else is shared.

copy.deepcopy would copy values too, and pickling takes ten times as long.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from megatron_ft.rpc.event_stream import EventBatch, EventSubscription, Outbox
from megatron_ft.smp.slots import ShardSlots
from megatron_ft.smp.state_machine import NodeMachine
from megatron_ft.supervisor.cycle import SnapshotCycle
from megatron_ft.supervisor.schedule import Schedule
from tests.protocol.model.drain import Drain
from tests.protocol.model.encoder import Encoder, MpiWorld, Session
from tests.protocol.model.incarnation import Incarnation, Question
from tests.protocol.model.judge import Judge
from tests.protocol.model.memory import MemoryArena, MemorySlot
from tests.protocol.model.node import Node
from tests.protocol.model.processes import Loader, Reader, Trainer
from tests.protocol.model.world import World

CHANGING = (
    World,
    Node,
    NodeMachine,
    EventBatch,
    Outbox,
    EventSubscription,
    ShardSlots,
    MemoryArena,
    MemorySlot,
    Trainer,
    Encoder,
    Loader,
    Reader,
    MpiWorld,
    Session,
    Incarnation,
    Question,
    SnapshotCycle,
    Schedule,
    Drain,
    Judge,
)
"""Classes whose objects change; objects of all others are values."""

Memo = dict[int, Any]


def clone(world: World) -> World:
    """A World that goes its own way."""
    return _object(world, {})


def _object(old: Any, memo: Memo) -> Any:
    found = memo.get(id(old))
    if found is not None:
        return found
    new = memo[id(old)] = object.__new__(old.__class__)
    state = new.__dict__
    for name, value in old.__dict__.items():
        copy = COPIES.get(value.__class__)
        state[name] = value if copy is None else copy(value, memo)
    return new


def _dict(old: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    new = {}
    for key, value in old.items():
        copy = COPIES.get(value.__class__)
        new[key] = value if copy is None else copy(value, memo)
    return new


def _list(old: list[Any], memo: Memo) -> list[Any]:
    new = []
    for value in old:
        copy = COPIES.get(value.__class__)
        new.append(value if copy is None else copy(value, memo))
    return new


def _deque(old: deque[Any], memo: Memo) -> deque[Any]:
    return old.copy()


def _set(old: set[Any], memo: Memo) -> set[Any]:
    return old.copy()


def _tuple(old: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    """Only a reader's slots are tuples with something that changes."""
    if len(old) == 2 and old[1].__class__ is MemorySlot:
        return old[0], _object(old[1], memo)
    return old


COPIES: dict[type, Any] = {
    dict: _dict,
    list: _list,
    deque: _deque,
    set: _set,
    tuple: _tuple,
    **dict.fromkeys(CHANGING, _object),
}
