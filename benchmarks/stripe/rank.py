"""One member of a stripe as a process of a world: works in rounds, one after the other.

Started by benchmarks.stripe.world with a Plan as JSON.
"""

from __future__ import annotations

import sys
import time

import msgspec

from benchmarks.stripe.counting import CountingTransport
from benchmarks.stripe.works import Works
from megatron_ft.cli.doctor.facts import say
from megatron_ft.erasure.transport import Link, Transport, barrier
from megatron_ft.erasure.world import World, join_world


class Plan(msgspec.Struct, frozen=True):
    """A stripe, and what its members do: every work once a round, in this order.

    One round before them is not counted.  ``size`` is bytes of tensors of each member.
    """

    kind: str
    k: int
    m: int
    size: int
    works: tuple[str, ...]
    rounds: int
    measure_memory: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """One work on one rank: seconds until all ranks had done it, and the rank's own costs.

    ``to_peers`` is bytes of chunks sent to each rank, ``sent`` bytes of all messages.
    """

    rank: int
    work: str
    round: int
    seconds: float
    cpu_seconds: float
    sent: int
    to_peers: tuple[int, ...]


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Bytes held beside the member while encoding."""

    rank: int
    data_bytes: int
    most_bytes: int


Answer = Done | Memory


def main() -> None:
    """Do what the plan says; any error ends the world."""
    world = join_world()
    try:
        _carry_out(world, msgspec.json.decode(sys.argv[1], type=Plan))
        world.leave()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        world.abort(1)


def _carry_out(world: World, plan: Plan) -> None:
    transport = world.transport()
    works = Works(plan.kind, plan.k, plan.m, plan.size, transport)
    for number in range(plan.rounds + 1):
        for name in plan.works:
            done = _once(world, works, name, number)
            if number:
                say(done)
    if plan.measure_memory:
        most = works.memory(CountingTransport(transport))
        say(Memory(transport.rank, works.code.data_bytes, most))


def _once(world: World, works: Works, name: str, number: int) -> Done:
    transport = CountingTransport(world.transport())
    _meet(world.transport())
    begin, used = time.perf_counter(), time.process_time()
    works.run(name, transport)
    cpu = time.process_time() - used
    _meet(world.transport())
    seconds = time.perf_counter() - begin
    if name in ("gather", "direct", "ring"):
        works.require_right_parity()
    if name.startswith("rebuild:"):
        works.require_right_rebuild()
    to_peers = tuple(transport.to_peers())
    return Done(transport.rank, name, number, seconds, cpu, transport.bytes_sent, to_peers)


def _meet(transport: Transport) -> None:
    barrier(Link(transport, range(transport.size), None))


if __name__ == "__main__":
    main()
