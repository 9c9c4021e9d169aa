"""What an SMP says of its trainers' progress, and how their stacks are asked for."""

from __future__ import annotations

import msgspec

from megatron_ft.core.identity import Count
from megatron_ft.rpc.message_base import Message


class PulseReport(msgspec.Struct, frozen=True, array_like=True):
    """One trainer's signs of life as its node sees them; all times are durations in seconds.

    ``idle`` is how long it has passed no mark, ``quiet`` how long its watching thread has not
    run, ``state`` the kernel's letter for its process (proc(5)), ``age`` how long the process
    is there.  The parts of its start are 0 until its first iteration has ended.  See
    rpc.pulse.Pulse for the rest.
    """

    rank: int
    phase: int
    iteration: int
    marks: int
    done: int
    idle: float
    quiet: float
    typical: float
    longest: float
    window: int
    own: float
    spread: float
    state: str
    age: float
    imports: float
    communicators: float
    set_up: float
    restore: float
    first_iteration: float


class StacksRequest(Message, frozen=True):
    """Have all trainers of the node write their stacks.

    ``resume`` also wakes those that are suspended, which write theirs only then: for a life
    that is about to be ended.
    """

    incarnation: Count
    resume: bool = False


class Stacks(Message, frozen=True):
    """Answer to StacksRequest: shard id to what faulthandler wrote, as far as it came in time."""

    node: str
    stacks: dict[str, str]
