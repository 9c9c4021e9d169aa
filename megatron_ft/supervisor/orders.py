"""Orders to the nodes: arenas to make, stripes to encode or rebuild, and their timeouts.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.arena.format import Geometry
from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import Ancestor
from megatron_ft.rpc import messages as m


@dataclass(frozen=True)
class Timing:
    """Seconds.  A node that is silent for ``node_timeout`` is lost; it must exceed the lease,
    so that a node which was only cut off has stopped its trainers before it is replaced.
    ``encode_timeout`` bounds parity, and a capture from when a trainer has passed its iteration."""

    heartbeat: float = 0.5
    lease: float = 10.0
    node_timeout: float = 15.0
    encode_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.lease < 4 * self.heartbeat:
            raise ConfigError(
                f"a lease of {self.lease:g} s is too short for heartbeats every "
                f"{self.heartbeat:g} s: give at least {4 * self.heartbeat:g} s"
            )
        if self.node_timeout <= self.lease:
            raise ConfigError(
                f"a node would be replaced after {self.node_timeout:g} s of silence, before its "
                f"lease of {self.lease:g} s has run out"
            )


def create_requests(
    stripes: Sequence[StripeState],
    incarnation: int,
    lineage: tuple[Ancestor, ...],
    slot_count: int,
) -> dict[str, m.CreateArena]:
    """The request that makes each shard's arena."""
    return {
        shard_id: m.CreateArena(
            incarnation=incarnation,
            shard_id=shard_id,
            lineage=lineage,
            codec=stripe.codec,
            data_members=stripe.data_members,
            parity_members=stripe.parity_members,
            member_index=index,
            members=stripe.members,
            data_bytes=stripe.data_bytes,
            block_bytes=stripe.block_bytes,
            slot_count=slot_count,
        )
        for stripe in stripes
        for index, shard_id in enumerate(stripe.members)
    }


def stripe_orders(
    stripes: Sequence[StripeState],
    places: Mapping[str, str],
    world: Sequence[str],
    lost: Mapping[StripeState, tuple[str, ...]] | None = None,
) -> tuple[m.StripeOrder, ...]:
    """Orders for all stripes that have parity, or with ``lost`` for those that lost members.

    ``places`` maps shards to nodes, ``world`` lists the nodes in the order of their
    encoders' ranks in their world.  Each node gets its part (``orders_by_node``) and fills in
    its own arenas and slots.
    """
    return tuple(
        m.StripeOrder(
            index=index,
            kind=stripe.codec,
            data_members=stripe.data_members,
            parity_members=stripe.parity_members,
            data_bytes=stripe.data_bytes,
            block_bytes=stripe.block_bytes,
            members=stripe.members,
            world_ranks=tuple(world.index(places[s]) for s in stripe.members),
            arenas={},
            slots={},
            lost=() if lost is None else lost[stripe],
        )
        for index, stripe in enumerate(stripes)
        if stripe.parity_members and (lost is None or stripe in lost)
    )


def orders_by_node(
    orders: Sequence[m.StripeOrder], places: Mapping[str, str]
) -> dict[str, tuple[m.StripeOrder, ...]]:
    """Each node's part of the orders: the stripes that have a member there, in the same sequence.

    So what a node is sent, and reads, does not grow with the job.  Encoders still meet: any two
    that share stripes have them in one sequence.  Nodes without any are left out.
    """
    found: dict[str, list[m.StripeOrder]] = {}
    for order in orders:
        for node in dict.fromkeys(places[shard] for shard in order.members):
            found.setdefault(node, []).append(order)
    return {node: tuple(part) for node, part in found.items()}


def shards_by_node(shards: Iterable[str], places: Mapping[str, str]) -> dict[str, list[str]]:
    """These shards by the node of each; nodes without any are left out."""
    found: dict[str, list[str]] = {}
    for shard_id in shards:
        found.setdefault(places[shard_id], []).append(shard_id)
    return found


def bytes_by_node(
    requests: Mapping[str, m.CreateArena], places: Mapping[str, str]
) -> dict[str, int]:
    """Bytes of the arenas of each node, headers included."""
    by_node = shards_by_node(requests, places)
    return {n: sum(file_bytes(requests[shard]) for shard in there) for n, there in by_node.items()}


def file_bytes(request: m.CreateArena) -> int:
    """Bytes of the file of an arena."""
    parity = request.parity_members * request.data_bytes // request.data_members
    sizes = (request.slot_count, request.data_bytes, parity, request.block_bytes)
    return Geometry(*sizes).file_bytes
